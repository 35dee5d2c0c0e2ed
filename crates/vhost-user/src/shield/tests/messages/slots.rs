//! Memory that a hypervisor adds and removes region by region.

use ringfence_wire::vhost_user::MemoryRegion;

use super::*;

/// Serves a hypervisor that uses slots of memory.
fn serve_slots(behaviours: &'static [Behaviour]) -> (Served, Frontend) {
    let (served, socket) = serve(false, behaviours);
    let protocol = shape().protocol | protocol::CONFIGURE_MEM_SLOTS;
    let mut front = front_of(FrontShape { protocol, ..shape() }, socket);
    front.set_up().unwrap();
    (served, front)
}

#[test]
fn vrings_continue_with_their_chains_when_the_region_with_their_tables_is_changed() {
    let (served, mut front) = serve_slots(&[Behaviour::Late]);
    (0..4).for_each(|token| push(&mut front, 0, token));
    served.wait_for_taken(4);
    front.remove_region(front.own_region()).unwrap();
    let taken = served.seen.lock().unwrap().taken;
    push(&mut front, 0, 4);
    push(&mut front, 1, 5);
    front.ask(number::GET_MAX_MEM_SLOTS, &[]).unwrap();
    // Time for a shield that would serve them.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(served.seen.lock().unwrap().taken, taken, "a vring without memory is served");
    front.add_region(front.own_region(), front.file.as_fd()).unwrap();
    let mut tokens: Vec<_> = (0..5).map(|_| pop(&mut front, 0).0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2, 3, 4]);
    assert_eq!(pop(&mut front, 1).0, 5);
    assert_eq!(served.stop(), [""; 0]);
}

#[test]
fn region_that_was_removed_before_is_a_fault_and_others_change_nothing() {
    let (served, mut front) = serve_slots(&[Behaviour::Honest]);
    let other = memfd(1 << 20).unwrap();
    let region = MemoryRegion { guest: 1 << 46, len: 1 << 20, user: 1 << 46, offset: 0 };
    front.add_region(region, other.as_fd()).unwrap();
    push(&mut front, 0, 0);
    assert_eq!(pop(&mut front, 0), (0, 1), "another region changes nothing");
    front.remove_region(region).unwrap();
    push(&mut front, 0, 1);
    assert_eq!(pop(&mut front, 0), (1, 1));
    front.remove_region(region).unwrap_err();
    let faults = served.ended();
    assert!(faults[0].contains("no region of that length at 0x400000000000"), "{faults:?}");
}
