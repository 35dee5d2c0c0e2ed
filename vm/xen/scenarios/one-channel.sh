# title: one event channel for both rings of a queue, as older frontends have it
# set: all
# machine: xen
# limit: 60

# No option of the daemon's withdraws the second channel, so it is withdrawn in the store, before the guest's
# kernel looks.
FEATURE=feature-split-event-channels

use_ringfence
CREATE=-p
check 'a guest is created, and waits' guest one "$(vif 11)" || give_up 'nothing to see'
back=$BACKEND/vif/$(domain one)/0
check 'what it is offered is in the store' wait_for 10 key_is $back/state 2
check 'a second channel is withdrawn' xenstore-write $back/$FEATURE 0
check 'the guest starts' xl unpause one
check 'it has a network' ready_with_address one 11
check 'with one channel' test -n "$(key /local/domain/$(domain one)/device/vif/0/event-channel)"
streams one 11 8
check 'the daemon is killed and started again' killed_and_started
transfer 'one to dom0, taken over' one dom0 $ADDRESS 8
gone one
complete
