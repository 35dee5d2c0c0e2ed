#!/bin/sh
# Runs scenarios of vm/xen/scenarios on a hypervisor with grant windows, in an emulated machine.
#
#   run.sh IMAGES HYPERVISOR MODULES AGENT SCENARIO...
#
# IMAGES: the folder `images` of the vm suite's cache. HYPERVISOR: the ELF file that `cargo xtask xen build` makes.
# A scenario's line `# options: ...` is put on Xen's command line.
# MODULES: a folder with ringfence-window.ko and window-raw.ko for the images' kernel. AGENT: agent.c, linked statically.
# Environment: CPUS (1), PATIENCE (4), LOGS (a new folder in /tmp), XEN_OPTIONS, QEMU_OPTIONS.
# Status 0: every scenario made all its checks, all good, and the hypervisor reported nothing.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
images=$1 hypervisor=$2 modules=$3 agent=$4
shift 4
logs=${LOGS:-$(mktemp -d /tmp/window-tests.XXXXXX)}
mkdir -p $logs/share $logs/tree/boot $logs/tree/usr/bin $logs/guest/vm $logs/guest/window $logs/guest/usr/bin $logs/tree/vm
rm -f $logs/results $logs/console

{
    echo "PATIENCE=${PATIENCE:-4}"
    printf 'SHELL_WANTED=\nDEBUG_XEN=yes\nSUITE=xen\nTARGET=/\nTESTS=\nSCENARIOS="\n'
    for each in "$@"; do echo "$each $(sed -n 's/^# limit: //p' $here/vm/xen/scenarios/$each.sh)"; done
    echo '"'
} >$logs/guest/vm/orders
cp $logs/guest/vm/orders $logs/tree/vm/
for each in lib xen; do
    cp -r $here/vm/$each $logs/tree/vm/
    cp -r $here/vm/$each $logs/guest/vm/
done
cp -r $here/dist $logs/tree/
cp $here/vm/xen/guest-init $logs/guest/init
cp $here/vm/xen/dom0-init $logs/tree/init
chmod +x $logs/guest/init $logs/tree/init
cp $modules/ringfence-window.ko $modules/window-raw.ko $logs/guest/window/
cp $agent $logs/guest/usr/bin/agent
cp $agent $logs/tree/usr/bin/agent
(cd $logs/guest && find . | cpio -o -H newc --quiet) >$logs/tree/boot/ours.cpio
(cat $images/dom0.cpio; cd $logs/tree; find . | cpio -o -H newc --quiet) >$logs/root.cpio
rm -rf $logs/guest $logs/tree

# What a scenario wants on Xen's command line.
options=$(for each in "$@"; do sed -n 's/^# options: //p' $here/vm/xen/scenarios/$each.sh; done | tr '\n' ' ')
linux='console=hvc0 rdinit=/init quiet loglevel=4 mitigations=off cryptomgr.notests panic=5'
xen='com1=115200,8n1 console=com1 dom0_mem=900M,,max:900M dom0_max_vcpus=1 bootscrub=0 no-real-mode vga=none
    spec-ctrl=no xpti=no watchdog=0 loglvl=error guest_loglvl=all'
setpriv --pdeathsig KILL -- qemu-system-x86_64 -accel tcg,thread=multi -machine ${MACHINE:-q35} \
    -cpu qemu64,+rdrand,+svm,+npt -m 2048 -smp ${CPUS:-1} -nodefaults -no-user-config -display none -no-reboot \
    -fsdev local,id=share,path=$logs/share,security_model=none \
    -device virtio-9p-pci,fsdev=share,mount_tag=share ${QEMU_OPTIONS:-} \
    -serial file:$logs/console -serial file:$logs/results \
    -kernel $hypervisor -append "$(echo $xen | sed s/,,/,/g) $options ${XEN_OPTIONS:-}" \
    -initrd "$images/vmlinux $linux,$logs/root.cpio" </dev/null
rm -f $logs/root.cpio

good=$(grep -c '^ok ' $logs/results) || true
bad=$(grep -c '^not ok ' $logs/results) || true
planned=$(sed -n 's/^plan //p' $logs/results | awk '{ sum += $1 } END { print sum + 0 }')
grep -E '^(not ok|#|skip|left of)' $logs/results || true
reports=$(grep -acE 'Assertion|Xen call trace|UBSAN|Xen BUG|FATAL|panic' $logs/console) || true
echo "$good passed, $bad failed, $planned planned; $reports reports of the hypervisor; logs: $logs"
[ $bad = 0 ] && [ $good = $planned ] && [ $reports = 0 ] && grep -q '^down' $logs/results
