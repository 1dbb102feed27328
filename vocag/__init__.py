"""The public names: `from vocag import align_batch, load_tokenizer`.

Each is loaded on first use, so `import vocag` needs neither torch nor Beam nor numpy. Other names
may change between versions.
"""

from importlib import import_module

from vocag.own_packages import require_own_packages

TYPE_CHECKING = False  # as in `vocag.command`
if TYPE_CHECKING:
    from pipeline.alignment import align_batch as align_batch
    from pipeline.batches import AlignedBatch as AlignedBatch
    from pipeline.batches import SourceDocument as SourceDocument
    from pipeline.dataset.files import open_dataset as open_dataset
    from pipeline.dataset.webdataset_documents import decoded_documents as decoded_documents
    from pipeline.guidance import aggregate_teacher_losses as aggregate_teacher_losses
    from pipeline.guidance import guided_loss as guided_loss
    from pipeline.guidance import select_tokens as select_tokens
    from pipeline.losses.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from pipeline.methods.kind import MethodKind as MethodKind
    from pipeline.methods.method import Method as Method
    from pipeline.models.hf_models import hidden_states as hidden_states
    from pipeline.models.hf_models import load_language_model as load_language_model
    from pipeline.models.output_layer import output_layer as output_layer
    from pipeline.models.packed_attention import packed_arguments as packed_arguments
    from pipeline.models.packed_check import keep_documents_apart as keep_documents_apart
    from pipeline.scoring.teaching import Teaching as Teaching
    from pipeline.selection_rule import SelectionRule as SelectionRule
    from pipeline.streaming import AlignedRows as AlignedRows
    from pipeline.streaming import Reading as Reading
    from pipeline.streaming import Rows as Rows
    from pipeline.streaming import StreamConfig as StreamConfig
    from pipeline.streaming import StreamState as StreamState
    from pipeline.streaming import collate_rows as collate_rows
    from pipeline.streaming import load_batches as load_batches
    from pipeline.streaming.vocabularies import vocabulary_map as vocabulary_map
    from pipeline.tokenization import Tokenizer as Tokenizer
    from pipeline.tokenization import load_tokenizer as load_tokenizer
    from pipeline.training.export import prove_tokenizer as prove_tokenizer
    from pipeline.training.guided import GuidedStudent as GuidedStudent
    from pipeline.training.hf_trainer import GuidedTrainer as GuidedTrainer
    from pipeline.training.run_opening import OpenedTraining as OpenedTraining
    from pipeline.training.run_opening import open_training as open_training
    from schemas.document import AlignedDocument as AlignedDocument
    from schemas.document import decode_document as decode_document
    from schemas.document import document_key as document_key

# The same for the interpreter: names by module.
_MODULES = {
    "pipeline.alignment": "align_batch",
    "pipeline.batches": "AlignedBatch SourceDocument",
    "pipeline.dataset.files": "open_dataset",
    "pipeline.dataset.webdataset_documents": "decoded_documents",
    "pipeline.guidance": "aggregate_teacher_losses guided_loss select_tokens",
    "pipeline.losses.cross_entropy": "linear_cross_entropy",
    "pipeline.models.hf_models": "hidden_states load_language_model",
    "pipeline.models.output_layer": "output_layer",
    "pipeline.models.packed_attention": "packed_arguments",
    "pipeline.models.packed_check": "keep_documents_apart",
    "pipeline.scoring.teaching": "Teaching",
    "pipeline.selection_rule": "SelectionRule",
    "pipeline.streaming": "AlignedRows Reading Rows StreamConfig StreamState collate_rows"
    " load_batches",
    "pipeline.streaming.vocabularies": "vocabulary_map",
    "pipeline.tokenization": "Tokenizer load_tokenizer",
    "pipeline.training.export": "prove_tokenizer",
    "pipeline.training.guided": "GuidedStudent",
    "pipeline.training.hf_trainer": "GuidedTrainer",
    "pipeline.training.run_opening": "OpenedTraining open_training",
    "pipeline.methods.kind": "MethodKind",
    "pipeline.methods.method": "Method",
    "schemas.document": "AlignedDocument decode_document document_key",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
_EXTRAS = {"torch": "torch", "transformers": "hf"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in {*_HOMES, "__version__"}:
        raise AttributeError(f"module 'vocag' has no attribute {name!r}")
    require_own_packages()
    from pipeline.command_line.failures import hinted
    from pipeline.command_line.installed import install, installed_version

    if name == "__version__":
        return installed_version()
    try:
        found = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name in _EXTRAS:
            hinted(error, install(_EXTRAS[error.name]))
        raise
    globals()[name] = found  # the next use is as fast as any other
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
