#!/bin/sh
# Installs, uses, upgrades and removes the packages: try.sh ROOT PACKAGES RESULTS
#
# Runs as root in new network, mount and PID namespaces. ROOT is a directory with a Debian system, to which nothing is
# written: its changes are kept in memory and end with this script. PACKAGES is the directory with the packages. The
# results are appended to the file RESULTS, in the form of `cargo xtask vm`.
set -eu
root=$1 packages=$2 results=$3
here=$(dirname "$(readlink -f "$0")")
. "$here/use.sh"
. "$here/system.sh"

# Lists what dpkg has no owner for among the places of the packages.
left() {
    find /usr /etc /var/lib/dkms /lib/modules -path '*ringfence*' 2>/dev/null
    find /etc/apparmor.d -name 'ringfence*' 2>/dev/null
    for name in pasta passt pesto; do
        find /usr/bin /etc/alternatives /var/lib/dpkg/alternatives -name $name 2>/dev/null
    done
}
modules() { find /lib/modules -name 'ringfence-*.ko*' | wc -l; }
is_module_of_each_kernel() { [ "$(modules)" = $((2 * $(ls -d /lib/modules/*/build | wc -l))) ]; }

is 'the system has nothing of Ringfence' "$(left)" ''
package=$(echo /packages/ringfence_*.deb)
version=$(dpkg-deb --field "$package" Version)
readme=/usr/share/doc/ringfence/README.md
zsh=zsh/vendor-completions/_ringfence fish=fish/vendor_completions.d/ringfence.fish
dpkg-deb --raw-extract "$package" /tmp/older && sed -i 's/^Version: .*/Version: 0.0.1/' /tmp/older/DEBIAN/control
check 'ringfence: an older version is made' dpkg-deb -Znone --root-owner-group --build /tmp/older /tmp/older.deb
check 'ringfence: the older version is installed' dpkg --install /tmp/older.deb || give_up 'nothing to upgrade'
upgrade ringfence 'it is upgraded' dpkg --install "$package"
installed ringfence
is 'ringfence: the new version is installed' "$(dpkg-query --show --showformat '${Version}' ringfence)" "$version"
check 'pasta is an alternative' sh -c 'pasta --version | grep Ringfence'
mkdir -p /etc/apparmor.d/abi && touch /etc/apparmor.d/abi/4.0
check 'AppArmor gets the profiles where it knows them' sh -c '
    /usr/share/ringfence/apparmor-profiles install && [ "$(ls -d /etc/apparmor.d/ringfence* | wc -l)" = 4 ]'
check 'the modules are installed' dpkg --install /packages/ringfence-*-dkms_*.deb
check 'both modules are built for each kernel' is_module_of_each_kernel ||
    tail -n 30 /var/lib/dkms/ringfence-*/*/build/make.log
check 'a package whose file is called pasta keeps it' sh -c '
    rm /usr/bin/pasta && echo other >/usr/bin/pasta
    dpkg --install /packages/ringfence_*.deb && grep other /usr/bin/pasta && rm /usr/bin/pasta'
check 'everything is removed' dpkg --purge ringfence ringfence-netfront-dkms ringfence-window-dkms
is 'nothing is left' "$(left)" ''
complete_scenario
