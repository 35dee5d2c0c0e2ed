# Helpers for the scenarios of Podman.

mkdir -p ~/.config/containers
cat >~/.config/containers/containers.conf <<END
[containers]
volumes = ["/usr:/usr:ro", "/clients:/clients:ro"]
# The default of Podman 5, without which a container cannot ping.
default_sysctls = ["net.ipv4.ping_group_range=0 0"]
[engine]
helper_binaries_dir = ["/programs", "/usr/libexec/podman", "/usr/lib/podman", "/usr/bin"]
cgroup_manager = "cgroupfs"
events_logger = "none"
[network]
END

# Podman of Debian 12.
if [ "$CLIENT" = podman-4 ]; then
    podman() { /programs/podman-4 "$@"; }
fi
note "$(podman --version)"

# Makes the image `base`: a root directory whose programs are those of the host.
make_image() {
    mkdir -p image/etc image/usr image/clients image/tmp image/run image/root image/home
    for each in bin lib lib64 sbin; do ln -s usr/$each image/$each; done
    echo 'root:x:0:0::/root:/bin/sh' >image/etc/passwd
    echo 'root:x:0:' >image/etc/group
    tar -C image -c . | podman import - base
}

# Start of each script in a container: the peer's modes as functions.
inside='tcp() { python3 /clients/peer.py tcp "$@"; }; udp() { python3 /clients/peer.py udp "$@"; }
    serve() { exec python3 /clients/peer.py serve "$@"; };'
# run SCRIPT OPTION...: runs a script in a new container, and removes it.
run() {
    local script=$1
    shift
    podman run --rm "$@" base sh -ec "$inside $script"
}
# start SCRIPT OPTION...: the same in the background.
start() {
    local script=$1
    shift
    podman run --detach --quiet "$@" base sh -ec "$inside $script"
}
# sh_in CONTAINER SCRIPT: runs a script in a container.
sh_in() { podman exec "$1" sh -ec "$inside $2"; }
# remove CONTAINER...: kills and removes containers.
remove() { podman rm --force --time 0 "$@"; }

make_image >/dev/null || give_up 'no image'
