"""The options of `vocag score`."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from beam_jobs.job_errors import OptionsError
from beam_jobs.running.run_options import HERE, RunOptions
from pipeline.command_line import option_parsing
from pipeline.command_line.option_parsing import ModelSource, Option, Rest
from pipeline.packing.reading import Reading
from pipeline.scoring.engines.engine_settings import (
    ServedSettings,
    TopSettings,
    TransformersSettings,
)

Dtype = Literal["", "float32", "bfloat16", "float16"]
EngineName = Literal["transformers", "openai"]

_EXAMPLES = """\
examples:
  # for training with rows of 2,048 student tokens; a GPU is used if there is one
  vocag score aligned --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048

  # what would it take? a hundred documents, nothing written
  vocag score aligned --teacher models/smollm2.gguf --seq-length 512 --threads 1 --dry-run

  # only what a run with the same --where reads
  vocag score aligned --teacher models/teacher --seq-length 2048 --where "language == 'en'"

  # the same documents aligned with another student: what was scored before is taken over
  vocag score aligned-anew --teacher models/teacher --seq-length 2048 --reuse aligned

  # a mixture of experts in FP8 behind two vLLM servers (vllm serve … --served-model-name teacher)
  vocag score aligned --engine openai --endpoint http://gpu-1:8000 --endpoint http://gpu-2:8000 \\
      --model teacher --dtype bfloat16 --quantization fp8 --seq-length 2048

  # also the 8 likeliest next tokens of each position, and 4 draws of all others
  vocag score aligned --teacher models/teacher --seq-length 2048 --top-k 8

  # the 16 likeliest, or fewer that hold 0.95
  vocag score aligned --teacher models/teacher --seq-length 2048 --top-k 16 --top-mass 0.95

  # then train without a teacher
  vocag train --data aligned --stored-losses Qwen/Qwen2.5-Math-7B --method distill \\
      --seq-length 2048 --student models/student --output runs/guided

context: every document has its own left context. One that is longer than a row of the given
lengths is split where rows split it, so stored losses equal those that a teacher would give
while training with the same lengths; training with rows that split a document elsewhere is refused.

output: NAME-000000-of-000012.teacher-FINGERPRINT.safetensors next to every shard and, last,
teacher-FINGERPRINT.json.

Every other option goes to Apache Beam (--runner, --region, ...)."""

IN_PROCESS, NO_SERVERS, LOSSES_ONLY = TransformersSettings(), ServedSettings(), TopSettings()

_GROUPS = {
    "where": "what is scored",
    "teacher": "teacher and context",
    "dtype": "how the job runs",
    "engine": "what runs the teacher",
    "workers": "processes of this machine",
}


@dataclass(frozen=True)
class ScoreOptions:
    """Run a frozen teacher over every document of an aligned dataset, once, and store its losses.

    Each teacher token's loss is written next to the shards, in two bytes; with --top-k also the
    likeliest next tokens. Training then needs no teacher. Shards are never rewritten, and several
    teachers can score one dataset. Run the same command again to resume.

    Attributes:
        dataset: dataset to score, or a mixture, of which each dataset is scored. Rows of other
            documents don't take the losses.
        teacher: folder, Hugging Face repository (owner/name) or .gguf file. With --engine openai,
            the files behind the servers, if they are at hand: their digest then identifies the
            scores, in place of the model's name.
        seq_length: student tokens per training row.
        teacher_seq_length: teacher tokens per training row (default: the dataset's ratio plus
            12.5 %, as in training).
        learned_only: store scores of a conversation's learned tokens alone (default: yes).
        top: what is stored besides losses.
        allow_untrained_teacher: accept a teacher that predicts a plain text no better than chance.
        reuse: dataset to copy stored losses from, for documents with the same teacher tokens and
            context, whatever their ids; the rest is computed; repeatable.
        dtype: data type of the teacher's weights (default: bfloat16 on a GPU, float32 on a CPU).
        here: how a worker runs the teacher.
        dry_run: score the first hundred documents in this process, report what the job would read,
            write and take, and their mean loss; write nothing.
        engine: what runs the teacher; openai asks servers of the completions API that give
            prompt_logprobs, as vLLM does.
        served: where servers are, and how they are asked.
        run: how many processes, and what they say.
        beam_arguments: options for Beam.
    """

    # A teacher's losses are those of the newest generation.
    dataset: Annotated[Reading, Option(form="positional", without=("generation",))]
    teacher: ModelSource = ""
    seq_length: int = field(kw_only=True)
    teacher_seq_length: int | None = None
    learned_only: bool | None = None
    top: TopSettings = LOSSES_ONLY
    allow_untrained_teacher: bool = False
    reuse: Annotated[tuple[str, ...] | None, Option("DATASET", form="repeated")] = None
    dtype: Dtype = ""
    here: TransformersSettings = IN_PROCESS
    dry_run: bool = False
    engine: EngineName = "transformers"
    served: ServedSettings = NO_SERVERS
    run: RunOptions = HERE
    beam_arguments: Rest = ()

    def __post_init__(self) -> None:
        own = self.served
        if self.engine == "openai":
            if self.top.draws:
                raise OptionsError(
                    "--draws needs --engine transformers: servers give their likeliest tokens "
                    "alone, and nothing can be drawn from the rest"
                )
            object.__setattr__(self, "top", replace(self.top, draws=0))
        if self.engine == "transformers":
            if not self.teacher:
                raise OptionsError("--teacher is required")
            for name in ("endpoint", "model", "quantization", "engine_version"):
                if getattr(own, name):
                    raise OptionsError(f"--{name.replace('_', '-')} needs --engine openai")
        elif not (own.endpoint and own.model and own.quantization and self.dtype):
            raise OptionsError(
                "--engine openai needs --endpoint, --model, --dtype and --quantization (such as "
                "none or fp8): a server reports neither of the last two, and they change the losses"
            )


def parse_options(arguments: Sequence[str] | None = None) -> ScoreOptions:
    """Parse a command line; unknown options go to Beam."""
    return option_parsing.parse_options(
        ScoreOptions, arguments, prog="vocag score", epilog=_EXAMPLES, groups=_GROUPS
    )
