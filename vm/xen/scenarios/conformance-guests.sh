# title: the platform conforms between two guests, neither of which has a role in the toolstack
# set: all
# machine: xen
# limit: 180
# grants: bad

. /vm/xen/conformance.sh

check 'two guests are created' create_pair || give_up 'without guests there is nothing to see'
check 'they take commands' guest_ready one two || give_up 'guests that do not answer show nothing'
first_id=$(domain_id one) second_id=$(domain_id two)
start_half one lender $second_id
start_half two user $first_id
check 'the second guest uses what the first lends' half_passes two
check 'the first guest says the same' half_passes one
start_half one user $second_id
start_half two lender $first_id
check 'the first guest uses what the second lends' half_passes one
check 'the second guest says the same' half_passes two
complete_scenario
