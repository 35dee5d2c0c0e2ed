# title: QEMU's card on passt by vhost-user
# limit: 60

check 'passt starts' start --vhost-user --socket socket --one-off || give_up 'no passt'
machine vhost-user socket
results vhost-user
kill $machine
check 'passt ends with the machine' wait_for 5 gone "$(cat passt.pid)"
complete_scenario
