#!/bin/sh
# Installs, uses, upgrades and removes the archives of `cargo xtask dist`: try-archives.sh ROOT PACKAGES RESULTS
#
# As try.sh, with the RPM packages (rpm), the package for Arch Linux (pacman), the static tarball, the wheel (pip) and, for
# both, nothing but the artefact itself: the system has no other package of Ringfence.
set -eu
root=$1 packages=$2 results=$3
here=$(dirname "$(readlink -f "$0")")
. "$here/system.sh"

# Lists what is in the places of the packages.
left() {
    find /usr /etc /opt -path '*ringfence*' 2>/dev/null
    find /etc/apparmor.d -name 'ringfence*' 2>/dev/null
}
# use NAME PROGRAM: the program as a new user calls it.
use() {
    is "$1: it says its version" "$("$2" --version)" "ringfence $version"
    check "$1: an ordinary user runs a command" as_user "$2" run --uplink none -- true
    check "$1: two guests transfer by TCP" as_user "$2" demo
    rm -f /tmp/disk.img
    check "$1: a disk keeps what is written" as_user sh -c "
        head -c 65536 /dev/urandom >/tmp/data && truncate -s 8M /tmp/disk.img &&
        '$2' run --uplink none --disk /tmp/disk.img -- sh -c 'nbdcopy /tmp/data \"\$RINGFENCE_DISK0_URI\"' &&
        cmp -n 65536 /tmp/data /tmp/disk.img"
    check "$1: it says what the host allows" as_user "$2" doctor
    check "$1: it shows guests" as_user "$2" top --interval 0.2
}
# installed NAME: what a package puts beside the program.
installed() {
    use "$1" /usr/bin/ringfence
    check "$1: programs find it as passt" sh -c '/usr/libexec/ringfence/passt --version | grep Ringfence'
    check "$1: the manual has a page for a command" sh -c 'man --pager=cat ringfence-run | grep -i publish'
    check "$1: bash reads the completion" bash -n /usr/share/bash-completion/completions/ringfence
    check "$1: the configuration of the daemon is valid" ringfence serve --check
}

version=$(basename /packages/ringfence-*-1.x86_64.rpm | cut -d- -f2)
is 'the system has nothing of Ringfence' "$(left)" ''

rpm --initdb
main=/packages/ringfence-$version-1.x86_64.rpm selinux=/packages/ringfence-selinux-$version-1.x86_64.rpm
# Debian's rpm knows no package of the system, so the shell that scripts need is not found.
check 'rpm: it is installed' rpm --install --nodeps "$main" || give_up 'nothing to use'
installed rpm
check 'rpm: no file differs from the package' rpm --verify --nodeps ringfence
echo '# changed' >>/etc/ringfence/ringfence.toml
check 'rpm: it is installed over itself' rpm --upgrade --nodeps --replacepkgs "$main"
check 'rpm: the changed configuration was kept' grep -q '^# changed' /etc/ringfence/ringfence.toml
check 'rpm: the SELinux policy is installed' rpm --install --nodeps "$selinux"
for name in pasta passt pesto; do
    check "rpm: $name is a program of its own, for its context" sh -c "
        [ -f /usr/libexec/ringfence/selinux/$name ] && [ ! -L /usr/libexec/ringfence/selinux/$name ] &&
        /usr/libexec/ringfence/selinux/$name --version | grep Ringfence"
done
check 'rpm: the policy is removed' rpm --erase --nodeps ringfence-selinux
check_not 'rpm: its copies are gone' test -e /usr/libexec/ringfence/selinux
check 'rpm: it is removed' rpm --erase --nodeps ringfence
rm -f /etc/ringfence/ringfence.toml.rpmsave && rmdir /etc/ringfence 2>/dev/null
is 'rpm: nothing is left' "$(left)" ''

archive=/packages/ringfence-$version-1-x86_64.pkg.tar.zst
# Debian has neither the directories of pacman's database nor the list of mounts that it reads.
ln -sf /proc/self/mounts /etc/mtab
mkdir -p /var/lib/pacman /var/cache/pacman/pkg
arch() { pacman --noconfirm --dbpath /var/lib/pacman --cachedir /var/cache/pacman/pkg "$@"; }
check 'pacman: it is installed' arch --upgrade "$archive" || give_up 'nothing to use'
installed pacman
check 'pacman: no file differs from the package' arch --query --check --check ringfence
echo '# changed' >>/etc/ringfence/ringfence.toml
check 'pacman: it is installed over itself' arch --upgrade "$archive"
check 'pacman: the changed configuration was kept' grep -q '^# changed' /etc/ringfence/ringfence.toml
check 'pacman: it is removed' arch --remove --recursive --nosave ringfence
rm -f /etc/ringfence/ringfence.toml.pac* && rmdir /etc/ringfence 2>/dev/null
is 'pacman: nothing is left' "$(left)" ''

check 'tarball: it is unpacked' tar --extract --directory /opt --file "/packages/ringfence-$version-x86_64-linux.tar.xz"
use tarball "/opt/ringfence-$version-x86_64-linux/bin/ringfence"
check 'tarball: its checksum is right' sh -c 'cd /packages && sha256sum --check --ignore-missing SHA256SUMS'
rm -r "/opt/ringfence-$version-x86_64-linux"
is 'tarball: nothing is left' "$(left)" ''

check 'wheel: it is installed' sh -c '
    python3 -m venv /opt/environment && /opt/environment/bin/pip install --no-index /packages/ringfence-*.whl'
use wheel /opt/environment/bin/ringfence
check 'wheel: it is removed' /opt/environment/bin/pip uninstall --yes ringfence
is 'wheel: nothing is left' "$(left)" ''
complete_scenario
