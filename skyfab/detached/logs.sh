# shellcheck shell=sh
# Lists the logs of a detached run: in each line a file name, its inode number, and its size in bytes.
#
# Given by detached/folder.py: run, the id of the run. By session/bootstrap.sh: c, full path of the cache folder.
: "${c?}" "${run?}"
cd "$c/runs/$run/logs" 2>/dev/null || exit 0
for f in *; do
  # shellcheck disable=SC2046 # two words: the inode number and the name
  set -- $(ls -i "$f")
  echo "$f $1 $(wc -c <"$f")"
done
