# shellcheck shell=sh
# Prints which of the packages this host lacks; marks the others as used, for gc. What a relay has put into the content
# store becomes a package.
#
# Given by env/install.py: packages, one in each line: the size, 0 if unknown, and the path below packages/. By
# session/bootstrap.sh: c, full path of the cache folder.
: "${c?}" "${packages?}"
while read -r n f; do
  h=${f%%/*} p=$c/packages/${f%%/*}
  if ! test -f "$c/packages/$f" && test -f "$c/blobs/$h"; then
    mkdir -p "$p" && ln "$c/blobs/$h" "$c/packages/$f"
  fi 2>/dev/null
  # shellcheck disable=SC2046 # the words of ls
  set -- $(ls -ln "$c/packages/$f" 2>/dev/null)
  case ${5:-0}/$n in
    0/*) ;;
    */0|"$n/$n")
      touch -c "$p"
      continue
      ;;
  esac
  # a file of another size was damaged, as by a power cut; the blob may be the same file
  test $# = 0 || rm -f "$c/packages/$f" "$c/blobs/$h"
  rmdir "$p" 2>/dev/null
  echo "$f"
done <<END
$packages
END
