# shellcheck shell=sh
# Prints which of the packages this host lacks; marks the others as used, for gc.
#
# Given by env/install.py: packages, their paths below packages/, one in each line. By session/bootstrap.sh: c, full
# path of the cache folder.
: "${c?}" "${packages?}"
while IFS= read -r f; do
  { test -f "$c/packages/$f" && touch -c "$c/packages/${f%%/*}"; } || echo "$f"
done <<END
$packages
END
