# shellcheck shell=sh
# Prints the state of detached runs. For each run four lines: "=run ID yes" ("no": its agent does not live), what the
# run is and its status, both as JSON, and "=last LINE", the last line of its latest log.
# For all runs also a line "=gpu PERCENT, MEGABYTES" for each GPU, whose query may take a second.
#
# Given by detached/folder.py: run, the id of a run, or empty for all; alive.sh before this. By session/bootstrap.sh: c,
# full path of the cache folder.
: "${c?}" "${run?}"
if test -n "$run"; then set -- "$c/runs/$run"; else set -- "$c"/runs/*; fi
for d; do
  test -s "$d/about" || continue
  if alive "$d"; then a=yes; else a=no; fi
  echo "=run ${d##*/} $a"
  head -c 65536 "$d/about"; echo
  head -c 65536 "$d/status"; echo
  l=
  # shellcheck disable=SC2045 # the agent names the logs, without blanks; the order of ls is wanted
  for f in $(cd "$d/logs" 2>/dev/null && ls -t); do
    l=$(tail -c 2000 "$d/logs/$f" | tr -d '\000' | grep . | tail -n 1)
    test -z "$l" || break
  done
  printf '=last %s\n' "$l"
done
test -n "$run" ||
  nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader,nounits 2>/dev/null | sed 's/^/=gpu /'
true
