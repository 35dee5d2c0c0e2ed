# title: one event channel for both rings of a queue, as older frontends have it
# set: all
# machine: xen
# limit: 60

# No option of the daemon's withdraws the second channel, so it is withdrawn in the store, before the guest's
# kernel looks.
FEATURE=feature-split-event-channels

use_ringfence
CREATE=-p
check 'a guest is created, and waits' create_guest one "$(vif_line 11)" || give_up 'nothing to see'
back=$BACKEND/vif/$(domain_id one)/0
check 'what it is offered is in the store' wait_for 10 key_is $back/state 2
check 'a second channel is withdrawn' xenstore-write $back/$FEATURE 0
check 'the guest starts' xl unpause one
check 'it has a network' start_network one 11
check 'with one channel' test -n "$(read_key /local/domain/$(domain_id one)/device/vif/0/event-channel)"
check_streams one 11 8
check 'the daemon is killed and started again' restart_daemon
check_transfer 'one to dom0, taken over' one dom0 $ADDRESS 8
check_destruction one
complete_scenario
