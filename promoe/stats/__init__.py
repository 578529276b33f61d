"""Says what happened: counters, text reports, timelines, saved runs.

    recorder     counts while the model runs
    counts       the counters as frozen records, per layer and phase
    totals       all counters of a run (`model.promoe.stats()`), and their summary as text
    over_time    which experts were needed when
    text_report  the report as text; `words` writes its sentences and advice
    run_table    the quantities by which runs are compared
    run          a measured run; `saved_run` writes it as JSON and reads it
    tracing      a timeline for Perfetto; `lanes` finds in it where a pass spent its time
    routing      records which experts the gates choose

It only watches: nothing here changes what runs.
"""
