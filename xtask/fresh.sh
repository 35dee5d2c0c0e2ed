#!/bin/sh
# Runs the commands of the README as a newcomer does: fresh.sh ROOT SOURCE RESULTS WHO NEEDED TOOLCHAIN [COMMANDS]
#
# Runs as root in new mount and PID namespaces. ROOT is a directory with a new Debian system, which this script changes.
# SOURCE is a clone of the repository. RESULTS is a directory for the results and logs. WHO is `root` or `user`. NEEDED is the
# oldest Rust that the project supports. TOOLCHAIN is the directory of the host's Rust, for a machine that cannot download
# rustup's. COMMANDS are `first`, `second`, or both.
#
# The network is that of the host. Each line of RESULTS/WHO.results is `COMMAND STATUS SECONDS`, or `note TEXT`.
set -eu
root=$1 source=$2 results=$3 who=$4 needed=$5 toolchain=$6
commands=${7:-first second}
# The user that `adduser` would make first.
user=1000

mount --make-rprivate /
mount --bind "$root" "$root"
mkdir -p "$root/source" "$root/results" "$root/opt/rust" "$root/old" "$root/etc/ssl/certs"
mount --bind -o ro "$source" "$root/source"
mount --bind "$results" "$root/results"
mount --bind "$toolchain" "$root/opt/rust"
mount -o remount,bind,ro "$root/opt/rust"
# The network may have a certificate authority of its own.
mount --bind /etc/ssl/certs "$root/etc/ssl/certs"
cp /etc/resolv.conf "$root/etc/resolv.conf"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount --rbind /sys/fs/cgroup "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=0755 dev "$root/dev"
mkdir "$root/dev/net" "$root/dev/shm" "$root/dev/pts"
chmod 1777 "$root/dev/shm"
for device in 'null c 1 3' 'zero c 1 5' 'full c 1 7' 'random c 1 8' 'urandom c 1 9' 'tty c 5 0' 'net/tun c 10 200' \
    'fuse c 10 229'; do
    # Split on purpose: name, kind, major and minor number.
    # shellcheck disable=SC2086
    mknod -m 0666 "$root"/dev/$device
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
for link in 'ptmx pts/ptmx' 'fd /proc/self/fd' 'stdin /proc/self/fd/0' 'stdout /proc/self/fd/1' 'stderr /proc/self/fd/2'; do
    ln -s "${link#* }" "$root/dev/${link% *}"
done
mount -t tmpfs -o mode=0755 run "$root/run"
case $(cat "$root/etc/debian_version") in
    12.*) ;;
    # As Debian does since version 13.
    *) mount -t tmpfs -o mode=1777 tmp "$root/tmp" ;;
esac
cd "$root"
pivot_root . old
umount -l /old

log=/results/$who
: >"$log.results"
note() { echo "note $*" | tee -a "$log.results"; }

version=$(apt-cache policy rustc 2>/dev/null | sed -n 's/^ *Candidate: \([0-9.]*\).*/\1/p')
if [ -z "$version" ] || [ "$(printf '%s\n' "$needed" "$version" | sort -V | head -1)" != "$needed" ]; then
    note "Debian's rustc is ${version:-not known}; the project needs $needed, so rustup's is used"
fi

if [ "$who" = user ]; then
    id $user >/dev/null 2>&1 || useradd --create-home --uid $user --shell /bin/bash newcomer
    home=$(getent passwd $user | cut -d: -f6)
else
    user=0 home=/root
fi
mkdir -p /run/user/$user
chown $user:$user /run/user/$user
chmod 0700 /run/user/$user

# Runs a command as the newcomer. Only what a network may need is left of the environment.
as_newcomer() {
    setpriv --reuid $user --regid $user --clear-groups env -i HOME=$home LANG=C.UTF-8 XDG_RUNTIME_DIR=/run/user/$user \
        PATH=$home/.cargo/bin:$rust/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin CARGO_TERM_PROGRESS_WHEN=never \
        ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} \
        ${SSL_CERT_FILE:+SSL_CERT_FILE="$SSL_CERT_FILE"} "$@"
}

rust=
rustup='curl --proto =https -sSf --max-time 60 https://sh.rustup.rs | sh -s -- -y --profile minimal'
if as_newcomer sh -c "$rustup" >"$log-rustup.log" 2>&1 && as_newcomer cargo --version >/dev/null 2>&1; then
    note "$(as_newcomer rustc --version), of rustup's minimal profile"
else
    rust=/opt/rust/bin:
    note "rustup cannot be downloaded here; the host's $(as_newcomer rustc --version) is mounted read-only"
fi

cd $home
# Another user owns the source.
as_newcomer env GIT_CONFIG_GLOBAL=/source/xtask/gitconfig git clone --quiet /source ringfence
cd ringfence

# Runs a command of the README, and notes its status and duration.
run() {
    name=$1
    shift
    echo "$who: $*"
    start=$(date +%s)
    status=0
    as_newcomer timeout -k 30 10800 "$@" >"$log-$name.log" 2>&1 </dev/null || status=$?
    echo "$name $status $(($(date +%s) - start))" | tee -a "$log.results"
}

for command in $commands; do
    case $command in
    first) run first cargo run --release -- run -- ip addr ;;
    second) run second cargo xtask test ;;
    esac
done
