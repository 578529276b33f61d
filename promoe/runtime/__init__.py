"""One patched model: `patch`, `from_pretrained`, the handle, the hot path.

    loading, patching  `from_pretrained`; `patch` and `unpatch`. The first two take the next four steps
    checking           checks the arguments
    finding            finds the experts and the store that holds them
    slot_plan          plans the slots (`sizes`) and makes the predictor
    serving            puts it all under the model, or changes nothing (`assembly`)
    hot_path           what runs once or twice per MoE layer and token
    prediction         runs the predictor, in a thread or in the forward
    handle             `model.promoe`: a `slot_handle`, or a `resident` one if the experts need no slots

All parts of promoe meet in `assembly`, and nowhere else.
"""
