"""Print what the importable Megatron has changed of `megatron_plugin.upstream`, as JSON.

The names come from the plugin's own syntax trees, and its calls too: each is bound to the signature
that this Megatron has. Run it with a checkout in front of PYTHONPATH to ask about that one.
"""

import ast
import importlib
import inspect
import json
import sys
import warnings
from dataclasses import fields
from pathlib import Path

PLUGIN = Path(__file__).resolve().parents[2] / "megatron_plugin"
# What syntax trees don't show: calls through variables and of Megatron's objects. Positional
# arguments, then the names of the others.
SCHEDULE = (0, "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size"
            " forward_only collect_non_loss_data")  # fmt: skip
CALLS = {
    "forward_backward_no_pipelining": SCHEDULE,
    "forward_backward_pipelining_without_interleaving": SCHEDULE,
    "GPTModel.forward": (4, "labels packed_seq_params output_processor"),
    "GPTModelBuilder.build_model": (2, ""),
    "PackedSeqParams": (0, "qkv_format cu_seqlens_q cu_seqlens_kv max_seqlen_q max_seqlen_kv"),
    "ProcessGroupCollection.use_mpu_process_groups": (0, ""),
}
FIELDS = {
    "TransformerBlockSubmodules": "layer_specs layer_norm",
    "TransformerLayerSubmodules": "input_layernorm self_attention pre_mlp_layernorm",
    "SelfAttentionSubmodules": "core_attention q_layernorm k_layernorm",
}
REPLACED = ("training.get_forward_backward_func", "dataset_utils.compile_helpers")
# What both losses take of `output_processor`'s keywords.
PROCESSED = "hidden_states output_layer output_weight labels compute_language_model_loss"


def main():
    """Print where Megatron is, and the list of changes."""
    warnings.simplefilter("ignore")
    where = str(Path(importlib.import_module("megatron.core").__file__).parents[2])
    print(json.dumps({"where": where, "changes": all_changes()}))


def all_changes():
    """Return what the importable Megatron has changed."""
    names, changes = resolve_names()
    changes += [*changed_parallel_state(names), *changed_calls(names), *changed_objects(names)]
    return sorted(set(changes))


def resolve_names():
    """Return what `upstream` imports, by its name there, and what can't be imported."""
    names, changes = {}, []
    for node in ast.walk(ast.parse((PLUGIN / "upstream.py").read_text())):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            try:
                names[alias.asname or alias.name] = resolve(node.module, alias.name)
            except (ImportError, AttributeError) as error:
                changes.append(f"{node.module}.{alias.name} can't be imported: {error}")
    return names, changes


def resolve(module, name):
    """Return an attribute of a module, or a module in it."""
    found = importlib.import_module(module)
    if hasattr(found, name):
        return getattr(found, name)
    return importlib.import_module(f"{module}.{name}")


def changed_parallel_state(names):
    """Yield functions of `parallel_state` that we use and that are gone."""
    state = names.get("parallel_state")
    for node in plugin_nodes(ast.Attribute):
        if dotted(node.value) == "parallel_state" and not hasattr(state, node.attr):
            yield f"parallel_state.{node.attr} is gone"


def changed_calls(names):
    """Yield calls that no longer fit, those of the syntax trees and those of CALLS."""
    for node in plugin_nodes(ast.Call):
        open_ended = [k for k in node.keywords if k.arg is None]
        open_ended += [argument for argument in node.args if isinstance(argument, ast.Starred)]
        if not open_ended:
            named = [keyword.arg for keyword in node.keywords]
            yield from misfit(names, dotted(node.func), len(node.args), named)
    for name, (num_positional, named) in CALLS.items():
        yield from misfit(names, name, num_positional, named.split())
    # The first one's `**` keeps it out of the trees' calls above.
    for name in ("TransformerConfig", "GPTModelConfig"):
        calls = [node for node in plugin_nodes(ast.Call) if dotted(node.func) == name]
        wanted = {keyword.arg for call in calls for keyword in call.keywords if keyword.arg}
        yield from missing_fields(names, name, wanted)


def missing_fields(names, name, wanted):
    """Yield fields that a dataclass of the names lacks."""
    known = {field.name for field in fields(names[name])} if name in names else set()
    yield from (f"{name} has no field {field}" for field in wanted if field not in known)


def misfit(names, name, num_positional, named):
    """Yield what is wrong about a call of one of the names."""
    first, *attributes = name.split(".")
    if first not in names:
        return
    found = names[first]
    for attribute in attributes:
        found = getattr(found, attribute, None)
    if found is None:
        yield f"{name} is gone"
    elif callable(found) and not isinstance(found, type(sys)):
        try:
            inspect.signature(found).bind(*[None] * num_positional, **dict.fromkeys(named))
        except TypeError as error:
            yield f"{name} is called otherwise: {error}"
        except ValueError:  # an enumeration's member, or something without a signature
            pass


def changed_objects(names):
    """Yield fields, replaced attributes and keywords of `output_processor` that are gone."""
    for name, wanted in FIELDS.items():
        yield from missing_fields(names, name, wanted.split())
    for name in REPLACED:
        owner, attribute = name.split(".")
        if not hasattr(names.get(owner), attribute):
            yield f"{name} is gone"
    model = names.get("GPTModel")
    tree = ast.parse(inspect.getsource(sys.modules[model.__module__])) if model else ast.Module([])
    given = {
        keyword.arg
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and dotted(node.func) == "output_processor"
        for keyword in node.keywords
    }
    yield from (
        f"output_processor gets no {each}" for each in PROCESSED.split() if each not in given
    )


def plugin_nodes(kind):
    """Yield the nodes of one kind in the plugin's modules that import something of `upstream`."""
    for path in sorted(PLUGIN.rglob("*.py")):
        source = path.read_text()
        if "megatron_plugin.upstream import" in source:
            yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, kind))


def dotted(node):
    """Return a name with its attributes, an empty string for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    main()
