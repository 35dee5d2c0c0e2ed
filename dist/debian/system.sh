# Enters a Debian system for a trial; to be sourced, with the variables root, packages, results and here.
#
# The shell runs as root in new network, mount and PID namespaces. Nothing is written to the directory of the system: its
# changes are kept in memory and end with the shell. Defines `as_user`, and the checks of vm/lib.
user=1234

mount --make-rprivate /
mount -t tmpfs -o mode=0755 packages /mnt
mkdir /mnt/upper /mnt/work /mnt/new
mount -t overlay -o lowerdir="$root",upperdir=/mnt/upper,workdir=/mnt/work root /mnt/new
new=/mnt/new
mkdir -p $new/packages $new/checks $new/old
touch $new/results
mount --bind "$packages" $new/packages
mount --bind "$here/../../vm/lib" $new/checks
mount --bind "$results" $new/results
mount -t proc proc $new/proc
mount -t tmpfs -o mode=0755 dev $new/dev
mkdir $new/dev/net $new/dev/shm $new/dev/pts
for device in 'null c 1 3' 'zero c 1 5' 'random c 1 8' 'urandom c 1 9' 'tty c 5 0' 'net/tun c 10 200'; do
    # Split on purpose: name, kind, major and minor number.
    # shellcheck disable=SC2086
    mknod -m 0666 $new/dev/$device
done
mount -t devpts -o newinstance,ptmxmode=0666 devpts $new/dev/pts
ln -s pts/ptmx $new/dev/ptmx
ln -s /proc/self/fd $new/dev/fd
mount -t sysfs sysfs $new/sys
mount -t tmpfs -o mode=1777 tmp $new/tmp
mount -t tmpfs -o mode=0755 run $new/run
cd $new
pivot_root . old
umount -l /old
ip link set lo up
mkdir -p /run/user/$user
chown $user:$user /run/user/$user

RESULTS=/results
export DEBIAN_FRONTEND=noninteractive HOME=/root LANG=C.UTF-8
set +e
. /checks/both.sh
. /checks/checks.sh

# Runs a command as an ordinary user.
as_user() {
    setpriv --reuid $user --regid $user --clear-groups --inh-caps=-all \
        env -i PATH=/usr/bin:/bin HOME=/tmp XDG_RUNTIME_DIR=/run/user/$user "$@"
}
