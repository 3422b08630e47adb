"""Load on the real servers, by the real tools: `perf_analyzer` on tritonserver, `aiperf` on `kvc-trt serve`.

    python -m benchmarks.serving --help

`points.py` names what is measured; `servers.py` and `tritonserver.py` start the servers; `perf_analyzer.py` and
`aiperf.py` run the tools and read their output; `page.py` writes docs/results/serving.md.
"""
