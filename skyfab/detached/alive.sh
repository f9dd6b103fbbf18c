# shellcheck shell=sh
# alive FOLDER: whether the agent of the detached run in that folder lives; then its process id is in pid.
# It goes before look.sh and stop.sh (detached/folder.py) and before env/gc.sh.
alive() {
  read -r pid boot folder <"$1/agent" 2>/dev/null || return 1
  test "$boot" = "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null || echo '?')" || return 1
  # at its end its folder goes first, and then it writes how the run ended
  if test -d /proc/self; then
    case $(readlink "/proc/$pid/cwd" 2>/dev/null) in "$folder"|"$folder (deleted)") ;; *) false;; esac
  else kill -0 "$pid" 2>/dev/null; fi
}
