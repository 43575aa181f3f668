"""The OpenAI-compatible HTTP face of an engine (extra `serve`).

    body       bytes of a request -> a JSON object                 chat      messages -> a prompt
    schema     a JSON object -> what is asked, strictly            answer    events -> the body of an answer
    ask        what is asked -> requests of the engine             stream    events -> server-sent events
    errors     what goes wrong -> status, code, body               logprobs  both formats of log-probabilities
    guard      keys, hosts, request ids                            metrics   counters -> Prometheus text
    app        routes                                              lifecycle listening, draining, ending

`body`, `schema`, `ask` and `answer` serve batch files too, and need none of the extra's packages.
"""
