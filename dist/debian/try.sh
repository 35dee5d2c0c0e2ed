#!/bin/sh
# Installs, uses and removes the packages: try.sh ROOT PACKAGES RESULTS
#
# Runs as root in new network, mount and PID namespaces. ROOT is a directory with a Debian system, to which nothing is
# written: its changes are kept in memory and end with this script. PACKAGES is the directory with the packages. The
# results are appended to the file RESULTS, in the form of `cargo xtask vm`.
set -eu
root=$1 packages=$2 results=$3
here=$(dirname "$(readlink -f "$0")")
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
check 'ringfence is installed' dpkg --install /packages/ringfence_*.deb || give_up 'nothing to use'
check 'an ordinary user runs a command' as_user ringfence run --uplink none -- true
is 'it says its version' "$(ringfence --version)" "ringfence $(dpkg-query --show --showformat '${Version}' ringfence)"
check 'pasta is an alternative' sh -c 'pasta --version | grep Ringfence'
check 'programs can find it in a directory of its own' sh -c '/usr/libexec/ringfence/passt --version | grep Ringfence'
check 'the manual has a page for a command' sh -c 'man --pager=cat ringfence-run | grep -i publish'
check 'bash reads the completion' bash -n /usr/share/bash-completion/completions/ringfence
check 'the configuration of the daemon is valid' ringfence serve --check
echo '# changed' >>/etc/ringfence/ringfence.toml
check 'it is installed over itself' dpkg --install /packages/ringfence_*.deb
check 'the changed configuration was kept' grep -q '^# changed' /etc/ringfence/ringfence.toml
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
