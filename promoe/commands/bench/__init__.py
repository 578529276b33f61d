"""`promoe bench`: systems that serve a model, beside each other. `promoe demo` is a preset of it.

options, example      what it can be asked for; where the demo model and its prompts are
systems               the systems, by name
forms                 experts in fewer bits, and the caches that give all systems equal memory
served, process       a system that is open in this process, or in one of its own whose memory is limited
messages              what a system is asked, and what it answers
stock, peers          opening the unmodified model, and other software
gguf_writer           a checkpoint as a GGUF file
llama_cpp             llama.cpp, which serves such a file
whole_layers          naive offloading with this library
in_place              the least time that computing takes
tasks                 the prompts, and the reference that all answers are compared with
round, table          a comparison at one cache size, and the table that it gives
run                   all cache sizes
show, quantised       what is printed, with markdown
beside_llama_cpp      likewise: llama.cpp beside this library
plots, command        what is drawn and written
"""
