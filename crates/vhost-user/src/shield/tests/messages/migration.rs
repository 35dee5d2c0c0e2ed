//! Log of written pages, and vrings that stop while a machine migrates.

use ringfence_memory::PAGE_SIZE;

use super::*;
use crate::testing::PageMarks;

/// Address of a request's room, behind its 16 readable bytes.
fn room(front: &Frontend, token: u32) -> u64 {
    front.base() + (front.buffers_at() + token as usize * 8192) as u64 + 16
}

/// Passes a log, and waits for the answer.
fn send_marks(front: &Frontend, marks: &PageMarks) {
    let area = words(&[PageMarks::BYTES, 0]);
    front.send(number::SET_LOG_BASE, &area, &[marks.file()]).unwrap();
    // The answer comes without a request for it.
    assert_eq!(front.answer().unwrap().0, words(&[0]));
}

/// Switches marks on or off.
fn switch(front: &Frontend, is_on: bool) {
    let log = if is_on { LOG_ALL } else { 0 };
    let features = shape().features | PROTOCOL_FEATURES | log;
    front.order(number::SET_FEATURES, &words(&[features]), &[]).unwrap();
    (0..2).for_each(|vring| front.send_tables(vring, u32::from(is_on)).unwrap());
}

#[test]
fn written_pages_are_marked_while_the_machine_migrates() {
    let (served, socket) = serve(false, &[Behaviour::Honest]);
    let mut front = front(socket);
    front.set_up().unwrap();
    let marks = PageMarks::new().unwrap();
    let tables = front.base() + front.tables_at(0) as u64;
    let served_page = |front: &mut Frontend, token| {
        push(front, 0, token);
        assert_eq!(pop(front, 0), (token, 1));
        // A vring that stops has marked its used ring.
        front.ask(number::GET_VRING_BASE, &state(0, 0)).unwrap();
        front.send_vring(0).unwrap();
        let rooms = marks.take(room(front, token), 3).unwrap();
        (rooms, marks.take(tables, 2).unwrap().contains(&true))
    };
    send_marks(&front, &marks);
    assert_eq!(served_page(&mut front, 0), (vec![false; 3], false), "before");
    switch(&front, true);
    // A room of 4096 bytes lies in two pages.
    assert_eq!(served_page(&mut front, 1), (vec![true, true, false], true));
    switch(&front, false);
    front.send_tables(0, 1).unwrap();
    assert_eq!(served_page(&mut front, 2), (vec![false; 3], false), "after");
    assert_eq!(served.stop(), [""; 0]);
}

#[test]
fn log_that_comes_after_marks_were_on_has_all_memory() {
    let (served, socket) = serve(false, &[Behaviour::Honest]);
    let mut front = front(socket);
    front.set_up().unwrap();
    switch(&front, true);
    push(&mut front, 0, 0);
    assert_eq!(pop(&mut front, 0), (0, 1));
    let marks = PageMarks::new().unwrap();
    send_marks(&front, &marks);
    let pages = front.memory.len() / PAGE_SIZE;
    assert_eq!(marks.take(front.base(), pages).unwrap(), vec![true; pages]);
    // An enlarged log has what is written from then on.
    let other = PageMarks::new().unwrap();
    send_marks(&front, &other);
    assert_eq!(other.take(front.base(), 1).unwrap(), [false]);
    assert_eq!(served.stop(), [""; 0]);
}

#[test]
fn log_without_bits_for_the_machine_costs_the_connection() {
    let (served, socket) = serve(false, &[Behaviour::Honest]);
    let mut front = front(socket);
    front.set_up().unwrap();
    let short = log_file(4096).unwrap();
    front.send(number::SET_LOG_BASE, &words(&[4096, 0]), &[short.as_fd()]).unwrap();
    front.answer().unwrap();
    let features = shape().features | PROTOCOL_FEATURES | LOG_ALL;
    front.order(number::SET_FEATURES, &words(&[features]), &[]).unwrap();
    push(&mut front, 0, 0);
    let faults = served.ended();
    assert!(
        faults[0].contains("the hypervisor: vhost-user: the log of written pages ends"),
        "{faults:?}"
    );
}

#[test]
fn log_is_refused_that_was_not_negotiated_or_can_shrink() {
    let cases: [(_, _, &str); 2] = [
        (
            protocol::REPLY_ACK,
            log_file(4096).unwrap(),
            "a protocol feature that was not negotiated",
        ),
        (
            protocol::REPLY_ACK | protocol::LOG_FILE,
            memfd(4096).unwrap(),
            "sealed against shrinking",
        ),
    ];
    for (protocol, file, fault) in cases {
        let (served, socket) = serve(false, &[Behaviour::Honest]);
        let front = front(socket);
        front.negotiate().unwrap();
        front.order(number::SET_PROTOCOL_FEATURES, &words(&[protocol]), &[]).unwrap();
        front.send(number::SET_LOG_BASE, &words(&[4096, 0]), &[file.as_fd()]).unwrap();
        front.answer().unwrap_err();
        let faults = served.ended();
        assert!(faults[0].contains(fault), "{faults:?}");
    }
}

/// The log of chains in flight stays with the hypervisor that the machine leaves.
#[test]
fn vring_of_a_machine_that_migrates_stops_once_the_backend_has_used_its_chains() {
    let (served, socket) = serve(false, &[Behaviour::Late]);
    let mut front = front(socket);
    front.set_up().unwrap();
    send_marks(&front, &PageMarks::new().unwrap());
    switch(&front, true);
    (0..4).for_each(|token| push(&mut front, 0, token));
    served.wait_for_taken(4);
    let (answer, _) = front.ask(number::GET_VRING_BASE, &state(0, 0)).unwrap();
    assert_eq!(answer, state(0, 4));
    let mut tokens: Vec<_> = (0..4).map(|_| pop(&mut front, 0).0).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, [0, 1, 2, 3]);
    assert_eq!(served.stop(), [""; 0]);
}

/// Requests of the backend that left are repeated: it has answered none.
#[test]
fn chains_of_a_backend_that_leaves_while_a_vring_stops_are_available_again() {
    // The first backend may leave before the order arrives; the next one leaves as well.
    let (served, socket) = serve(true, &[Behaviour::LeavesLate]);
    let mut front = front(socket);
    front.set_up().unwrap();
    send_marks(&front, &PageMarks::new().unwrap());
    switch(&front, true);
    (0..4).for_each(|token| push(&mut front, 0, token));
    served.wait_for_taken(4);
    let (answer, _) = front.ask(number::GET_VRING_BASE, &state(0, 0)).unwrap();
    assert_eq!(answer, state(0, 0));
    assert_eq!(front.vrings[0].driver.pop(), Ok(None));
    assert!(!served.stop().is_empty());
}
