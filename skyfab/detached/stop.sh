# shellcheck shell=sh
# Terminates the agent of a detached run, and waits up to 10 s until it has ended. If it has not, prints why and fails.
#
# Given by detached/folder.py: run, the id of the run; alive.sh before this. By session/bootstrap.sh: c, full path of
# the cache folder.
: "${c?}" "${run?}"
d=$c/runs/$run
alive "$d" || exit 0
kill -TERM "${pid?}"
n=0
while test $n -lt 20; do
  alive "$d" || exit 0
  sleep 0.5
  n=$((n + 1))
done
echo "process $pid has not ended after 10 s; wait, or end it there: kill -9 $pid"
exit 1
