# shellcheck shell=sh
# Lists the logs of a detached run: in each line a file name, its inode number, its size in bytes, and the size of the
# file that says when it was written.
#
# Given by detached/logs.py: run, the id of the run. By session/bootstrap.sh: c, full path of the cache folder.
: "${c?}" "${run?}"
cd "$c/runs/$run/logs" 2>/dev/null || exit 0
for f in *; do
  # shellcheck disable=SC2046 # two words: the inode number and the name
  set -- $(ls -i "$f")
  n=$(wc -c <"$f")
  if test -r "../times/$f"; then t=$(wc -c <"../times/$f"); else t=0; fi
  echo "$f $1 $n $t"
done
