"""`promoe demo`: a preset of `promoe bench` that shows what promoe buys, on a small trained model.

options       what it can be asked for
systems       the systems of `promoe bench` that it compares, and their names in the story
setups        the real machine whose balance of transfer and computing part 1 imitates
comparison    one comparison: all systems open in this process
show          what is printed
command       the story
"""
