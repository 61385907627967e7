# The HTTP gateway: no torch, no model. Build from the repository's root:
#   docker build -f deploy/images/gateway.Dockerfile -t triptych-gateway .
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS build
# Where pip finds packages, if not on its default index.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_TRUSTED_HOST
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# The final environment has no pip: the build's pip installs into it.
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/triptych
COPY deploy/locks/ deploy/locks/
RUN grep '^setuptools==' deploy/locks/dev.txt > /tmp/setuptools.txt \
 && /build/bin/python -m pip install --no-deps --require-hashes -r /tmp/setuptools.txt \
 && /build/bin/python -m pip --python /opt/triptych/bin/python install --no-deps --require-hashes -r deploy/locks/gateway.txt \
    -r deploy/locks/otel.txt
# A checkout is built into a wheel; a folder that `triptych compose-files` wrote has one.
COPY . .
RUN wheel="$(ls ./*.whl 2>/dev/null || true)" \
 && /build/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir /build/wheels "${wheel:-.}" \
 && /build/bin/python -m pip --python /opt/triptych/bin/python install --no-deps /build/wheels/*.whl

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/triptych /opt/triptych
# compose.secure.yaml mounts a volume here, which takes its owner from the folder.
RUN install -d -o 10001 -g 10001 -m 700 /secure
ENV PATH=/opt/triptych/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
  CMD ["/opt/triptych/bin/triptych", "healthcheck", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["/opt/triptych/bin/triptych", "gateway"]
CMD ["--host", "0.0.0.0"]
