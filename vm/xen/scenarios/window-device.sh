# title: the device of grant windows: both roles, pins, and processes that are killed
# set: name
# machine: xen-pvh
# limit: 900
# driver: window-tests

. /vm/xen/window.sh

# window_frame: prints the first frame of the only window.
window_frame() {
    dump_windows | sed -n 's/.*registered at gfn \(0x[0-9a-f]*\).*/\1/p'
}

# restart_agent NAME: kills the agent as a crash would, and starts another.
restart_agent() {
    on $1 'kill -9 $(pidof agent); rm -f /run/agent.*; { agent serve >/tmp/agent.log 2>&1 & }; wait_for 20 test -p /run/agent.out'
}

before=$(free_memory)
check 'a granter is created' create_window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' create_window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
granter_id=$(domain_id one) grantee_id=$(domain_id two)
is 'the device is for root only' "$(on one stat -c %a-%u /dev/ringfence-window | tr -d '\r' | grep .)" 600-0
matches 'the granter opens the device' "$(granter dev-open)" ok
matches 'a domain that is none is refused' "$(granter dev-create 77 512)" 'No such device or address*'
matches 'a window is created' "$(granter dev-create $grantee_id 512)" 'ok handle 0'
matches 'a file is one window' "$(granter dev-create $grantee_id 512)" 'Device or resource busy*'
matches 'the grantee opens the device' "$(grantee dev-open)" ok
matches 'it registers' "$(grantee dev-register $granter_id 0 512)" ok

granter fill 0 by-the-device >/dev/null
matches 'a page is issued' "$(granter dev-issue 5 0 0)" 'ok 1 other 0'
is 'the grantee reads it' "$(grantee read 5)" by-the-device
matches 'its kernel can pin it' "$(grantee pin 5)" 'write 4 by-t vmsplice 4096 by-t'
matches 'a reference in use is not issued again' "$(granter dev-issue 5 1 0)" 'ok 0 other -3'
grantee raise 5 1 >/dev/null
matches 'a page in use is busy' "$(granter dev-revoke 5 - 0)" 'ok 0 other -14'
is 'it is still there' "$(grantee read 5)" by-the-device
matches 'force takes it' "$(granter dev-revoke 5 - 1)" 'ok 1 other 0'
is 'it is gone' "$(grantee read 5)" gone
grantee raise 5 0 >/dev/null
matches 'a batch is issued' "$(granter dev-issue 0 100 0 512)" 'ok 512 other 0'
matches 'the batch is revoked' "$(granter dev-revoke 0 - 0 512)" 'ok 512 other 0'

# The granter's process is killed.
granter dev-issue 0 100 0 100 >/dev/null
check 'the granter is killed' restart_agent one
matches 'its pages are gone' "$(grantee count 0 512)" 'gone 512 *'
is 'no window is left' "$(dump_windows | grep -c ' window .* to d')" 0

# A page that is pinned when its window is closed keeps the frames from the next window.
grantee dev-close >/dev/null
granter dev-open >/dev/null
handle=$(granter dev-create $grantee_id 512 | sed 's/.*handle //')
grantee dev-open >/dev/null
matches 'a second window registers' "$(grantee dev-register $granter_id $handle 512)" ok
first=$(window_frame)
granter dev-issue 3 3 0 >/dev/null
matches 'its page is held by the kernel' "$(grantee hold 3)" 'held 4096'
grantee dev-close >/dev/null
matches 'the granter learns that the window is gone' "$(granter dev-revoke 3 - 0)" 'ok 0 other -4'
granter dev-close >/dev/null
granter dev-open >/dev/null
handle=$(granter dev-create $grantee_id 512 | sed 's/.*handle //')
grantee dev-open >/dev/null
matches 'a third window registers' "$(grantee dev-register $granter_id $handle 512)" ok
second=$(window_frame)
note "frames of the windows: $first, $second"
check 'its frames do not have the held one' test $((second)) -gt $((first + 3))

# The grantee's process is killed.
granter dev-issue 0 100 0 100 >/dev/null
check 'the grantee is killed' restart_agent two
is 'no window is left of it' "$(dump_windows | grep -c ' window .* to d')" 0
matches 'the granter learns that' "$(granter dev-revoke 0 - 0 100)" 'ok 0 other -4'
for each in one two; do xl destroy $each; done
check 'the guests leave no zombie' wait_for 30 sh -c '[ $(xl list | wc -l) = 2 ]'
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
