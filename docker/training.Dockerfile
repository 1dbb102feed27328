# Image for scoring and training: `vocag score`, `vocag train`, torchrun.
#
#     docker build --file docker/training.Dockerfile --tag vocag-training .
#     docker run --gpus all --volume "$PWD:/work" vocag-training vocag train --data aligned ...
#     docker build --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu ...     # 3 GB less, no GPU
#
# torch's own wheels bring CUDA, so the base needs none; the host needs NVIDIA's container toolkit.
FROM python:3.12-slim

ARG EXTRAS=beam,hf,served,where
ARG TORCH_INDEX=
COPY . /tmp/vocag
RUN pip install --no-cache-dir --constraint /tmp/vocag/constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} "/tmp/vocag[${EXTRAS}]" \
    && pip check \
    && rm -r /tmp/vocag

# Open to every user: hub downloads, compiled kernels and plans go there.
ENV HOME=/work \
    OMP_NUM_THREADS=1
WORKDIR /work
RUN chmod a+rwX /work
CMD ["vocag", "--help"]
