"""Training: from routing traces to predictors that `promoe.patch` uses. The command is `promoe-train`.

    cli, options                 its verbs and their options
    collect, fit                 record a trace; train on it
    evaluate, export             judge kinds of predictors; write one for use
    trace_folder                 a trace on disk; `recorded_traces` and `routing_traces` read it
    baselines, hidden_states     the kinds of predictors that `evaluate` compares; `kinds` finds them by name
    measures                     what accuracy and the other measures mean

A patched model imports nothing of this package.
"""
