"""The command line: one folder per verb, and what several verbs share.

In a verb's folder, `options` declares its options, and `command` is what `promoe.cli` calls.

    charts                  the HTML report
    model_options           the options of verbs that open a model
    terminal, live_view     what is shown while a verb works
    measure                 times generation, so that systems can be compared
    lower_bound, contention the least time per token that a machine allows
"""
