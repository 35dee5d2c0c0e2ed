#!/bin/sh
# Host of a scenario: host.sh ROOT PROGRAMS RESULTS SUITE SCENARIO CLIENT
#
# Runs as root in new network, mount and PID namespaces. ROOT is a directory with a Debian system, to which nothing is
# written: its changes are kept in memory and end with the scenario. PROGRAMS is the directory that is first on the PATH,
# with the `pasta` under test; it may be empty. A veth pair connects `wan0` of the host to `out0` of an outside network.
# No packet leaves these namespaces. SUITE/SCENARIO.sh then runs as the user `tester`, and appends its results to the
# file RESULTS. CLIENT is the program whose use is tested, such as
# `podman`.
set -eu
root=$1 programs=$2 results=$3 suite=$4 scenario=$5 client=$6
here=$(dirname "$(readlink -f "$0")")
user=1234

# The root directory: ROOT below, memory above.
mount --make-rprivate /
mount -t tmpfs -o mode=0755 clients /mnt
mkdir /mnt/upper /mnt/work /mnt/new
mount -t overlay -o lowerdir="$root",upperdir=/mnt/upper,workdir=/mnt/work root /mnt/new
new=/mnt/new
mkdir -p $new/clients $new/vm/lib $new/programs $new/kernel $new/old
touch $new/results
mount --bind "$here" $new/clients
mount --bind "$here/../vm/lib" $new/vm/lib
mount --bind "$programs" $new/programs
mount --bind "$results" $new/results
mount --bind "$root/../kernel" $new/kernel
if [ -n "${PODMAN_TESTS:-}" ]; then
    mkdir $new/podman-tests
    mount --bind -o ro "$PODMAN_TESTS" $new/podman-tests
fi
chmod 0666 $new/results
mount -t proc proc $new/proc
mount -t sysfs sysfs $new/sys
mount -t cgroup2 none $new/sys/fs/cgroup
mount -t tmpfs -o mode=0755 dev $new/dev
mkdir $new/dev/net $new/dev/pts $new/dev/shm $new/dev/mqueue
for device in 'null c 1 3' 'zero c 1 5' 'full c 1 7' 'random c 1 8' 'urandom c 1 9' 'tty c 5 0' 'fuse c 10 229' \
    'net/tun c 10 200'; do
    # Split on purpose: name, kind, major and minor number.
    # shellcheck disable=SC2086
    mknod -m 0666 $new/dev/$device
done
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts $new/dev/pts
ln -s pts/ptmx $new/dev/ptmx
ln -s /proc/self/fd $new/dev/fd
mount -t tmpfs -o mode=1777 shm $new/dev/shm
mount -t tmpfs -o mode=1777 tmp $new/tmp
mount -t tmpfs -o mode=0755 run $new/run
mount -t tmpfs -o mode=0755 home $new/home
mkdir -p $new/run/user/$user $new/home/tester
chown $user:$user $new/run/user/$user $new/home/tester
chmod 0700 $new/run/user/$user
cd $new
pivot_root . old
umount -l /old
# As on a host with an init, and as crun wants it.
mount --make-rshared /

# The user, with ids of its own for containers.
echo "tester:x:$user:$user::/home/tester:/bin/sh" >>/etc/passwd
echo "tester:x:$user:" >>/etc/group
echo 'tester:100000:65536' >/etc/subuid
echo 'tester:100000:65536' >/etc/subgid
echo 'nameserver 192.0.2.1' >/etc/resolv.conf
echo host >/etc/hostname
printf '127.0.0.1 localhost\n::1 localhost\n' >/etc/hosts
# Podman of Debian 12 comes with libraries of that release. The process that conmon starts at the end of a container
# gets no variables of the environment.
if [ "$client" = podman-4 ]; then
    echo /programs >/etc/ld.so.conf.d/programs.conf
    ldconfig
fi

# The networks.
unshare --net sleep infinity &
outside=$!
until [ "$(readlink /proc/$outside/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
. /vm/lib/host-network.sh
host_network $outside
outside() { nsenter --net=/proc/$outside/ns/net "$@"; }
outside sh -ec '
    echo 0 >/proc/sys/net/ipv6/conf/out0/accept_dad
    ip link set lo up
    ip address add 192.0.2.1/24 dev out0
    ip address add 2001:db8:1::1/64 dev out0 nodad
    ip address add 198.51.100.1/32 dev lo
    ip address add 2001:db8:ffff::1/128 dev lo nodad
    ip link set out0 up
'
echo '0 2147483647' >/proc/sys/net/ipv4/ping_group_range

# Servers outside, a server at the loopback of this host, and a shell outside for the scenario.
peer=/clients/peer.py
outside python3 $peer serve 198.51.100.1 7000 &
outside python3 $peer serve 2001:db8:ffff::1 7000 &
outside python3 $peer names 192.0.2.1 53 &
outside python3 $peer shell /run/outside 0 &
python3 $peer serve 127.0.0.1 7001 &
until [ -S /run/outside ]; do sleep 0.05; done

exec setpriv --reuid $user --regid $user --clear-groups --inh-caps=-all env -i \
    PATH=/programs:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/home/tester USER=tester LANG=C.UTF-8 \
    XDG_RUNTIME_DIR=/run/user/$user RESULTS=/results CLIENT="$client" \
    sh /clients/scenario.sh "$suite" "$scenario"
