#!/bin/sh
# Installs, uses, upgrades and removes the archives of `cargo xtask dist`: try-archives.sh ROOT PACKAGES RESULTS
#
# As try.sh, with the RPM packages (rpm), the package for Arch Linux (pacman), the static tarball, the wheel (pip) and, for
# both, nothing but the artefact itself: the system has no other package of Ringfence.
set -eu
root=$1 packages=$2 results=$3
here=$(dirname "$(readlink -f "$0")")
. "$here/use.sh"
. "$here/system.sh"

# Lists what is in the places of the packages.
left() {
    find /usr /etc /opt -path '*ringfence*' 2>/dev/null
    find /etc/apparmor.d -name 'ringfence*' 2>/dev/null
}
version=$(basename /packages/ringfence-*-1.x86_64.rpm | cut -d- -f2)
is 'the system has nothing of Ringfence' "$(left)" ''

rpm --initdb
readme=/usr/share/doc/ringfence/README.md zsh=zsh/site-functions/_ringfence fish=fish/vendor_completions.d/ringfence.fish
main=/packages/ringfence-$version-1.x86_64.rpm selinux=/packages/ringfence-selinux-$version-1.x86_64.rpm
# Debian's rpm knows no package of the system, so the shell that scripts need is not found.
check 'rpm: an older version is installed' rpm --install --nodeps /packages/older/ringfence-0*.rpm || give_up 'nothing to upgrade'
upgrade rpm 'it is upgraded' rpm --upgrade --nodeps "$main"
is 'rpm: the new version is installed' "$(rpm --query ringfence)" "ringfence-$version-1.x86_64"
check 'rpm: it is removed' rpm --erase --nodeps ringfence
rm -f /etc/ringfence/ringfence.toml.rpmsave && rmdir /etc/ringfence 2>/dev/null
is 'rpm: nothing is left of both' "$(left)" ''
timed rpm 'it is installed' rpm --install --nodeps "$main" || give_up 'nothing to use'
installed rpm
check 'rpm: no file differs from the package' rpm --verify --nodeps ringfence
check 'rpm: the SELinux policy is installed' rpm --install --nodeps "$selinux"
for name in pasta passt pesto; do
    check "rpm: $name is a program of its own, for its context" sh -c "
        [ -f /usr/libexec/ringfence/selinux/$name ] && [ ! -L /usr/libexec/ringfence/selinux/$name ] &&
        /usr/libexec/ringfence/selinux/$name --version | grep Ringfence"
done
check 'rpm: the policy is removed' rpm --erase --nodeps ringfence-selinux
check_not 'rpm: its copies are gone' test -e /usr/libexec/ringfence/selinux
check 'rpm: it is removed again' rpm --erase --nodeps ringfence
is 'rpm: nothing is left' "$(left)" ''

# dnf checks what the packages depend on: the shell, for which another package stands here, and the main package.
cat >/tmp/shell.spec <<END
Name: system-shell
Version: 1
Release: 1
Summary: Shell of this system
License: none
Provides: /bin/sh
%description
%files
END
check 'dnf: a package for the shell is made' rpmbuild -bb --define '_topdir /tmp/shell' /tmp/shell.spec
dnf_alone() { dnf --quiet --assumeyes --disablerepo='*' --releasever 1 "$@"; }
check 'dnf: an older version is installed' dnf_alone install /tmp/shell/RPMS/*/*.rpm /packages/older/ringfence-0*.rpm
check 'dnf: it is upgraded' dnf_alone upgrade "$main"
is 'dnf: the new version is installed' "$(rpm --query ringfence)" "ringfence-$version-1.x86_64"
check 'dnf: the SELinux policy is installed' dnf_alone install "$selinux"
check 'dnf: it is removed, with the policy' dnf_alone remove ringfence
rm -rf /etc/ringfence
is 'dnf: nothing is left' "$(left)$(rpm --query --all | grep ringfence)" ''

archive=/packages/ringfence-$version-1-x86_64.pkg.tar.zst
# Debian has neither the directories of pacman's database nor the list of mounts that it reads.
ln -sf /proc/self/mounts /etc/mtab
mkdir -p /var/lib/pacman /var/cache/pacman/pkg
arch() { pacman --noconfirm --dbpath /var/lib/pacman --cachedir /var/cache/pacman/pkg "$@"; }
check 'pacman: an older version is installed' arch --upgrade /packages/older/ringfence-*.pkg.tar.zst || give_up 'nothing to upgrade'
upgrade pacman 'it is upgraded' arch --upgrade "$archive"
installed pacman
is 'pacman: the new version is installed' "$(arch --query ringfence)" "ringfence $version-1"
check 'pacman: no file differs from the package' arch --query --check --check ringfence
check 'pacman: it is removed' arch --remove --recursive --nosave ringfence
rm -f /etc/ringfence/ringfence.toml.pac* && rmdir /etc/ringfence 2>/dev/null
is 'pacman: nothing is left' "$(left)" ''

unpacked=/opt/user/ringfence-$version-x86_64-linux
check 'tarball: its checksum is right' sh -c 'cd /packages && sha256sum --check --ignore-missing SHA256SUMS'
check 'tarball: a user has a directory' install -d -o $user /opt/user
timed tarball 'it is unpacked' as_user tar --extract --directory /opt/user --file "/packages/ringfence-$version-x86_64-linux.tar.xz"
readme=$unpacked/share/doc/ringfence/README.md zsh=zsh/vendor-completions/_ringfence
use tarball "$unpacked/bin/ringfence"
files tarball "$unpacked/share"
check 'tarball: the configuration of the daemon is valid' "$unpacked/bin/ringfence" serve --check --config "$unpacked/share/ringfence/ringfence.toml"
rm -r "$unpacked"
is 'tarball: nothing is left' "$(left)" ''

environment=/opt/user/environment
check 'wheel: an older version is installed' as_user sh -c "
    python3 -m venv $environment && $environment/bin/pip install --no-index /packages/older/ringfence-*.whl"
timed wheel 'it is upgraded' as_user sh -c "$environment/bin/pip install --no-index --upgrade /packages/ringfence-*.whl"
check 'wheel: the new version is installed' sh -c "$environment/bin/pip show ringfence | grep -x 'Version: $version'"
readme=/tmp/wheel-readme
cat $environment/lib/python3*/site-packages/ringfence-*.dist-info/METADATA >$readme
use wheel $environment/bin/ringfence
# A wheel is the program alone, which prints the rest.
zsh=zsh/_ringfence fish=ringfence.fish
check 'wheel: the program writes its manual and completions' as_user PATH=$environment/bin:/usr/bin:/bin sh -ec '
    mkdir -p /tmp/share/bash-completion/completions /tmp/share/zsh
    ringfence man --install /tmp/share/man
    ringfence completions bash >/tmp/share/bash-completion/completions/ringfence
    ringfence completions zsh >/tmp/share/zsh/_ringfence
    ringfence completions fish >/tmp/share/ringfence.fish'
files wheel /tmp/share
check 'wheel: it is removed' as_user $environment/bin/pip uninstall --yes ringfence
rm -r /opt/user
is 'wheel: nothing is left' "$(left)" ''
complete_scenario
