#compdef skyfab
_skyfab() {
    local -a found
    found=(${(f)"$(skyfab --complete "$LBUFFER" 2>/dev/null)"})
    if (( $#found )); then
        compadd -S '' -- ${(M)found:#*=}
        compadd -- ${found:#*=}
    else
        _files
    fi
}
compdef _skyfab skyfab
