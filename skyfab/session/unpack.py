# Unpacks the bundle below the cache folder and becomes the link. session/bootstrap.py sends this text to an interpreter
# that session/bootstrap.sh has started, with the cache folder, the bundle's digest, the session and its mode (start,
# resume or ask) as its arguments. Next on stdin: a line with the size of the archive (session/bundle.py), and then it.
# Prints a marked line if it fails: failed WHY. The link itself says that it runs.
import io
import os
import shutil
import sys
import zlib

cache, digest, session, mode = sys.argv[1:]
target = os.path.join(cache, "bundles", digest)


def say(text: str) -> None:
    print("=sky" + "fab=" + session + "=" + text.replace("\n", " "), flush=True)


try:
    try:
        archive = io.BytesIO(zlib.decompress(sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))))
    except zlib.error as error:  # its checksum is wrong
        raise OSError("the bundle arrived damaged: " + str(error)) from error
    draft = target + "." + session
    os.makedirs(draft, mode=0o700)
    try:
        sizes = b""
        for line in iter(archive.readline, b""):
            sizes += line
            size, path = line.decode().split()
            path = os.path.join(draft, path)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(archive.read(int(size)))
        with open(draft + "/sizes", "wb") as file:  # by which each start recognizes files that are damaged
            file.write(sizes + b"end")
        try:
            os.rename(draft, target)
        except OSError:
            try:
                is_there = os.path.getsize(target + "/__main__.py") > 0  # unpacked by another pool meanwhile
            except OSError:
                is_there = False
            if not is_there:
                os.rename(target, draft + ".old")  # at once: another pool never starts a part of it
                os.rename(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(draft + ".old", ignore_errors=True)
except OSError as error:
    if not os.path.isdir(target):
        say("failed " + str(error))
        sys.exit(0)
if os.stat(target).st_uid != os.getuid():
    say("failed its cache folder belongs to another user: " + cache)
    sys.exit(0)
os.execv(sys.executable, [sys.executable, "-S", target, cache, session, mode])
