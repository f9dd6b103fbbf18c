# shellcheck shell=sh
# Keeps a set of containers: starts them, and removes them when stdin is at its end, because the program that holds the
# other end has closed it or has exited. Each container ends by itself then, too: it reads the same stdin.
#
# Given by providers/container.py: $0 the engine; $1 a folder for logs, which is removed at the end; $2 the name of the set;
# $3 how many containers; $4 the script that they run, and $5 its argument; then options of the engine's run. The first
# line of stdin is the image.
#
# Prints lines that begin with the name of a container: those of its script, and "node1 ended". "network ended" means
# that there is no network and so no container.
engine=$0 folder=$1 set=$2 count=$3 script=$4 argument=$5
shift 5
exec 3<&0
names=

start() {
    node=$1
    shift
    "$engine" run --rm --interactive --name "$set-$node" --hostname "$node" --label "skyfab=$set" \
        --network "$set" --publish 127.0.0.1::22 --user 0 --entrypoint sh "$@" \
        "$image" -c "$script" "$node" "$argument" <&3 2>"$folder/$node"
    echo "$node ended"
}

make_network() {
    "$engine" network create --label "skyfab=$set" "$set" >/dev/null 2>"$folder/network"
}

# Once more: podman fails if an interface of this machine disappears while it reads their addresses.
if make_network || { sleep 1 && make_network; }; then
    if read -r image <&3; then
        number=0
        while [ "$number" -lt "$count" ]; do
            number=$((number + 1))
            names="$names $set-node$number"
            start "node$number" "$@" &
        done
    fi
else
    echo network ended
fi
cat <&3 >/dev/null
exec >/dev/null 2>&1
if [ "$names" ]; then
    # shellcheck disable=SC2086 # the names have no spaces
    "$engine" kill $names
    wait
    # shellcheck disable=SC2086 # the names have no spaces
    "$engine" rm --force $names
fi
"$engine" network rm "$set"
rm -rf "$folder"
