# Unpacks the bundle below the cache folder and becomes the link. session/bootstrap.py sends this text to an interpreter
# that session/bootstrap.sh has started, with the cache folder, the bundle's digest, the session and start or resume as
# its arguments. Next on stdin: a line with the size and the sha256 of an archive, and the archive.
# Prints a marked line: link, or failed WHY.
import hashlib
import io
import os
import shutil
import sys
import tarfile

cache, digest, session, mode = sys.argv[1:]
target = os.path.join(cache, "bundles", digest)


def say(text: str) -> None:
    print("=sky" + "fab=" + session + "=" + text.replace("\n", " "), flush=True)


try:
    size, checksum = sys.stdin.buffer.readline().decode().split()
    content = sys.stdin.buffer.read(int(size))
    if hashlib.sha256(content).hexdigest() != checksum:
        raise OSError("the bundle arrived damaged")
    draft = target + "." + session
    os.makedirs(draft, mode=0o700)
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for entry in tar:
                path = os.path.join(draft, entry.name)
                os.makedirs(os.path.dirname(path), exist_ok=True)
                with open(path, "wb") as file:
                    file.write(tar.extractfile(entry).read())  # type: ignore[union-attr]
        if not os.path.isdir(target):
            os.rename(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
except OSError as error:
    if not os.path.isdir(target):
        say("failed " + str(error))
        sys.exit(0)
if os.stat(target).st_uid != os.getuid():
    say("failed its cache folder belongs to another user: " + cache)
    sys.exit(0)
say("link")
os.execv(sys.executable, [sys.executable, "-S", target, cache, session, mode])
