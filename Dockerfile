# fedgen without an installation of Python:
#     docker build --tag fedgen .
#     docker run --rm --volume "$PWD:/work" --shm-size 1g fedgen train method=mixture_small
FROM debian:12-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
# an index with torch and torchvision for CPUs alone, which are far smaller:
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH_INDEX=
COPY . /src
RUN python3 -m venv /opt/fedgen \
    && if [ -n "$TORCH_INDEX" ]; then \
        /opt/fedgen/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" torch torchvision; \
    fi \
    && /opt/fedgen/bin/pip install --no-cache-dir /src \
    && rm -r /src
ENV PATH=/opt/fedgen/bin:$PATH
RUN useradd --create-home fedgen && mkdir /work /home/fedgen/.fedgen && chown fedgen: /work /home/fedgen/.fedgen
USER fedgen
WORKDIR /work
ENTRYPOINT ["fedgen"]
