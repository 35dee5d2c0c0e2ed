# title: QEMU's card on a stream socket of passt
# limit: 60

option=
! passt --help 2>&1 | grep -q -e --conf-path || option='--conf-path control'
check 'passt starts' start --socket socket --one-off $option || give_up 'no passt'
machine stream socket
results stream
if [ -n "$option" ]; then
    check 'pesto adds a port' real-pesto --add -t 2023:22 control
    check 'it leads to the machine' wait_for 3 outside tcp 192.0.2.2 2023
else
    for each in 'pesto adds a port' 'it leads to the machine'; do skip "$each" 'this passt has no control socket'; done
fi
kill $machine
check 'passt ends with the machine' wait_for 5 gone "$(cat passt.pid)"
complete_scenario
