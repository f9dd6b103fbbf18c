# shellcheck shell=dash
# Prints lines ADDRESS:PORT, where a host reaches a port of its container, the best first; host:PORT is its own network.
# Given by pool/forward.py: container, its name; and port.
for e in podman docker; do
  $e port "${container?}" "${port?}/tcp"
  $e container inspect --format "{{.HostConfig.NetworkMode}}:$port" "$container"
  # the address in a user's own podman cannot be reached from outside
  case $e$(id -u) in
    podman[1-9]*) ;;
    *) $e container inspect --format "{{range .NetworkSettings.Networks}}{{.IPAddress}}:$port {{end}}" "$container";;
  esac
done 2>/dev/null | tr " " "\n"
