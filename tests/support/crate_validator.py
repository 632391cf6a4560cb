"""Run the RO-Crate validator without a network: crate_validator.py CONTEXT ARGUMENTS.

The Python of the validator runs this program: its requirements exclude those of Snakechat. CONTEXT
is a copy of the context of RO-Crate 1.3, which the library rocrate has; the validator would
download that of 1.1 for each crate. They differ in the address of Bioschemas' terms.
"""

import io
import sys
from email.message import Message
from pathlib import Path
from urllib.response import addinfourl

import rdflib._networking
import requests
import urllib3
from rocrate_validator.cli import cli

CONTEXT, *ARGUMENTS = sys.argv[1:]
URL = "https://w3id.org/ro/crate/1.1/context"
CONTENT = Path(CONTEXT).read_bytes().replace(b"bioschemas.org/terms/", b"bioschemas.org/")
TYPE = "application/ld+json"


def urlopen(request):
    """Return the context; rdflib asks for no other address."""
    assert request.full_url == URL, f"the crate refers to {request.full_url}"
    headers = Message()
    headers["Content-Type"] = TYPE
    return addinfourl(io.BytesIO(CONTENT), headers, URL, 200)


def send(self, request, **options):
    """Return the context; whether other addresses exist is not known here."""
    if request.url != URL:
        raise requests.ConnectionError(request.url)
    response = requests.Response()
    response.status_code, response.url, response.request = 200, URL, request
    response.headers["Content-Type"] = TYPE
    response.raw = urllib3.HTTPResponse(io.BytesIO(CONTENT), preload_content=False)
    return response


rdflib._networking.urlopen = urlopen
requests.adapters.HTTPAdapter.send = send
sys.argv = ["rocrate-validator", *ARGUMENTS]
cli()
