function __skyfab_words
    skyfab --complete (commandline -cp | string collect) 2>/dev/null
end
complete -c skyfab -f -n 'count (__skyfab_words) >/dev/null' -a '(__skyfab_words)'
