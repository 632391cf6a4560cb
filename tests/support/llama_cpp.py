"""Send requests to llama.cpp's server for a GGUF file: a program that needs only xllamacpp.

Standard input has a JSON list of [path, body], standard output the list of replies.
"""

import json
import os
import sys
import urllib.request

from xllamacpp import CommonParams, Server, ggml_type

settings = CommonParams()
settings.model.path = sys.argv[1]
settings.port = 0
settings.n_ctx, settings.n_parallel = 1024, 1
# Keys and values without loss.
settings.cache_type_k = settings.cache_type_v = ggml_type.GGML_TYPE_F32
settings.warmup, settings.verbosity = False, 0
settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 2
server = Server(settings)
replies = []
for path, body in json.load(sys.stdin):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        server.listening_address + path, json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as response:
        replies.append(json.load(response))
print(json.dumps(replies), flush=True)
# The threads of the server are not waited for.
os._exit(0)
