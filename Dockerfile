# For CPUs, and for NVIDIA GPUs with PyPI's CUDA build of torch (the host has the driver and the NVIDIA Container Toolkit):
#
#   docker build -t sparring .
#   docker build -t sparring:cuda --build-arg TORCH_INDEX=default .
#   docker run --rm --shm-size=8g -v "$PWD/outputs:/sparring/outputs" sparring train finetune
#   docker run --rm --shm-size=8g -v "$PWD/outputs:/sparring/outputs" --gpus all sparring:cuda train finetune
FROM debian:bookworm-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /sparring
COPY pyproject.toml constraints.txt README.md LICENSE setup_env.sh ./
COPY configs configs
COPY src src
RUN bash -euo pipefail -c '. ./setup_env.sh && PIP_NO_CACHE_DIR=1 set_up ""'
ENTRYPOINT ["sparring"]
CMD ["--help"]
