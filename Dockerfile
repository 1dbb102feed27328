# Image of the workers for --sdk_container_image (docs/guides/clusters.md):
#
#     docker build --tag REGISTRY/vocag-worker:0.1.0 .                          # gs://
#     docker build --tag REGISTRY/vocag-worker:0.1.0 --build-arg EXTRA=aws .    # s3://
#
# The tag of the base is the version of Beam that launches the job, and its Python the launcher's
# Python: both sides exchange pickled code.
FROM apache/beam_python3.12_sdk:2.77.0

ARG EXTRA=gcp
COPY . /tmp/vocag
RUN pip install --no-cache-dir "/tmp/vocag[${EXTRA}]" && pip check

# Kernels compiled here for any CPU of this architecture: by default numba compiles for the CPU at
# hand, and a worker with another one would compile them again. The folder is open to every user,
# because numba only reads caches that it could write to.
ENV NUMBA_CACHE_DIR=/opt/vocag/kernels \
    NUMBA_CPU_NAME=generic \
    NUMBA_CPU_FEATURES=""
RUN python /tmp/vocag/docker/compile_kernels.py \
    && chmod -R a+rwX /opt/vocag \
    && rm -r /tmp/vocag

# One tokenizer call is one thread; a worker process a core gives the parallelism.
ENV OMP_NUM_THREADS=1 \
    TOKENIZERS_PARALLELISM=false
