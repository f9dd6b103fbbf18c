# Sends a request to the index at the URL in the first argument, for env/probe.sh where there is no curl.
# Exit status 0: it has responded, whatever the response.
import sys
from urllib import error, request

try:
    request.urlopen(request.Request(sys.argv[1], method="HEAD"), timeout=2)
except error.HTTPError:
    pass
