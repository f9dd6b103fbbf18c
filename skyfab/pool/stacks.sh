# shellcheck shell=sh
# Has every worker in this cache write its stacks. Prints for each a line "=rank RANK PID POOL WORKER", and then what
# faulthandler has written. pool/stacks.py reads that.
#
# Given by session/bootstrap.sh: c, full path of the cache folder.
: "${c?}"
h=$(hostname)
for f in "$c"/run/"$h"/*/stacks/*; do
  read -r pid number rank worker <"$f" 2>/dev/null || continue
  d=${f%/stacks/*}
  # it has the file open: no other process got its number
  # shellcheck disable=SC2010 # the target of a link is looked for, not a file name
  ls -l "/proc/$pid/fd" 2>/dev/null | grep -qF -e "-> $(readlink -f "$f")" || continue
  n=$(wc -c <"$f")
  kill -"$number" "$pid" 2>/dev/null || continue
  # it is complete when it no longer grows; looks ten times at most
  i=0
  while test $i -lt 10; do
    sleep 0.1
    m=$(wc -c <"$f")
    test "$m" -gt "$n" && test "$m" = "$(sleep 0.05; wc -c <"$f")" && break
    i=$((i + 1))
  done
  echo "=rank $rank $pid ${d##*/} $worker"
  tail -c +$((n + 1)) "$f"
done
