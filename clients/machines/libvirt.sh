# title: libvirt in session mode: interfaces of the types user and vhostuser, with the passt backend
# limit: 150

note "libvirt $(libvirtd --version | head -n 1)"
virtlogd -d && libvirtd -d || give_up 'no libvirtd'
wait_for 10 virsh -c qemu:///session version || give_up 'no answer of libvirtd'
# domain TYPE: prints the description of a machine.
domain() {
    cat <<END
<domain type='qemu'>
  <name>$1</name><memory unit='MiB'>256</memory><vcpu>1</vcpu>
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <os><type arch='x86_64' machine='q35'>hvm</type><kernel>$PWD/kernel</kernel><initrd>$PWD/root.cpio</initrd>
    <cmdline>console=ttyS0 quiet mitigations=off panic=-1 rdinit=/init</cmdline></os>
  <on_poweroff>destroy</on_poweroff>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <serial type='file'><source path='$PWD/console'/></serial>
    <memballoon model='none'/>
    <interface type='$1'>
      <backend type='passt' logFile='$PWD/passt-$1.log'/><source dev='wan0'/><model type='virtio'/>
      <portForward proto='tcp'><range start='2022' to='22'/></portForward>
    </interface>
  </devices>
</domain>
END
}
for type in user vhostuser; do
    rm -f console
    domain $type >$type.xml
    check "$type: the machine starts" virsh -c qemu:///session create $type.xml || give_up "$(cat passt-$type.log)"
    results $type
    virsh -c qemu:///session destroy $type
    check "$type: passt ends with the machine" wait_for 5 none_left
done
complete_scenario
