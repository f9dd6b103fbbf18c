# shellcheck shell=sh
# Prints which of the packages this host lacks; marks the others as used, for gc. What a relay has put into the content
# store becomes a package.
#
# Given by env/install.py: packages, their paths below packages/, one in each line. By session/bootstrap.sh: c, full
# path of the cache folder.
: "${c?}" "${packages?}"
while IFS= read -r f; do
  h=${f%%/*} p=$c/packages/${f%%/*}
  if ! test -f "$c/packages/$f" && test -f "$c/blobs/$h"; then
    mkdir -p "$p" && ln "$c/blobs/$h" "$c/packages/$f"
  fi 2>/dev/null
  { test -f "$c/packages/$f" && touch -c "$p"; } || { rmdir "$p" 2>/dev/null; echo "$f"; }
done <<END
$packages
END
