# shellcheck shell=bash
_skyfab() {
    local line=${COMP_LINE:0:COMP_POINT} word typed before=
    typed=${line##*[[:space:]]}
    # bash takes what follows a = for a word of its own
    case $typed in *=*) before=${typed%=*}= ;; esac
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("${word#"$before"}")
    done < <(skyfab --complete "$line" 2>/dev/null)
    case ${COMPREPLY[0]-} in *=) compopt -o nospace ;; esac
}
complete -o default -F _skyfab skyfab
