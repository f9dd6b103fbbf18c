# shellcheck shell=dash
# Opens a shell of the user in a working folder, or runs a command there, with an environment first on PATH: skyfab ssh.
# A login shell runs it, so that profiles have been read.
#
# Given by session/interactive.py: cache, the cache folder; folder, the working folder: a path, a name in the cache, or
# empty; programs, a folder for PATH, env/DIGEST, or empty; otherwise, what to say if that is not there; tree, the digest
# of a project tree for PYTHONPATH, or empty; variables, a file in the cache that is read once, or empty; setup, lines
# that run first; command, or empty for a shell. By cli/exec.py: shell, for the command, instead of the user's own; and
# missing, which is said in place of `otherwise`, and only if the command is not found.
: "${cache?}" "${folder?}" "${programs?}" "${otherwise?}" "${tree?}" "${variables?}" "${setup?}" "${command?}"
# shellcheck disable=SC2088 # the tilde itself is meant
case $cache in
  /*) ;;
  "~/"*) cache=$HOME/${cache#"~/"};;
  *) cache=$HOME/$cache;;
esac
# shellcheck disable=SC2088 # the tilde itself is meant
case $folder in
  /*) ;;
  "") folder=.;;
  "~") folder=$HOME;;
  "~/"*) folder=$HOME/${folder#"~/"};;
  *)
    folder=$cache/files/$folder
    (umask 077; mkdir -p "$folder")
    ;;
esac
test -d "$folder" || mkdir -p "$folder"
cd "$folder" || cd || exit
# before the setup, which may fail: the file has secrets
skyfab_values=
test -z "$variables" || { skyfab_values=$(cat "$cache/$variables"); rm -f "$cache/$variables"; }
test -z "$setup" || eval "$setup" || exit
eval "$skyfab_values"
unset skyfab_values
if test -d "$cache/hub" && test -z "${HF_HUB_CACHE-}${HF_HOME-}"; then
  export HF_HUB_CACHE="$cache/hub"
fi
case $programs in
  env/*)
    programs=$cache/envs/${programs#env/}/bin
    if test -x "$programs/python"; then
      export VIRTUAL_ENV="${programs%/bin}"
      touch "$VIRTUAL_ENV/.used"
    else
      programs=
    fi
    ;;
esac
if test -n "$programs"; then
  export PATH="$programs:$PATH"
elif test -n "$otherwise"; then
  echo "$otherwise" >&2
fi
modules=
for found in "$cache/trees/$tree"/[0-9]* "$PWD/src"; do
  test -d "$found" && modules=${modules:+$modules:}$found
done
test -z "$modules" || export PYTHONPATH="$modules${PYTHONPATH:+:$PYTHONPATH}"
if test -n "$command" && test -z "$programs" && test -n "${missing-}"; then
  /bin/sh -c "$command"
  code=$?
  test "$code" != 127 || echo "$missing" >&2
  exit "$code"
fi
test -z "$command" || exec "${shell:-${SHELL:-/bin/sh}}" -c "$command"
case ${SHELL##*/} in
  bash)
    # .bashrc may put something else first
    exec "$SHELL" --rcfile /dev/fd/9 -i 9<<END
test ! -r /etc/bash.bashrc || . /etc/bash.bashrc
test ! -r ~/.bashrc || . ~/.bashrc
test -z "$programs" || PATH="$programs:\$PATH"
END
    ;;
  *) exec "${SHELL:-/bin/sh}" -i;;
esac
