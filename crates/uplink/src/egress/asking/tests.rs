use std::sync::mpsc::{Receiver, sync_channel};

use ringfence_policy::gate::{QueryEnds, QueryFate};
use ringfence_policy::{Action, HostName, PolicySource, Protocol, RuleSource};

use super::*;
use crate::counters::UplinkCounters;
use crate::egress::{Admitted, Asked, Egress};

const NOW: Duration = Duration::from_secs(1000);
const SECOND: Duration = Duration::from_secs(1);
const LIMITS: AskLimits = AskLimits { within: Duration::from_secs(30), at_a_time: 4 };

struct Fixture {
    egress: Egress,
    notes: Receiver<Option<Note>>,
    counters: UplinkCounters,
}

impl Fixture {
    fn new() -> Fixture {
        let rule = RuleSource {
            action: Action::Allow,
            text: "203.0.113.1:80".to_owned(),
            origin: "--allow".to_owned(),
        };
        let source = PolicySource { rules: vec![rule], ..PolicySource::default() };
        let (queue, notes) = sync_channel(1000);
        let policy = ringfence_policy::Policy::new(source).unwrap();
        let egress = Egress::with_questions(policy, Some(queue), false, Some(LIMITS));
        Fixture { egress, notes, counters: UplinkCounters::default() }
    }

    fn admit(&self, to: &str, now: Duration) -> Asked<Option<Admitted>> {
        self.egress.admit(to.parse().unwrap(), None, Protocol::Tcp, true, now, &self.counters)
    }

    /// Returns the number of the question for which a flow waits.
    fn held(&self, to: &str, now: Duration) -> Option<QuestionId> {
        match self.admit(to, now) {
            Asked::Held(waiting) => Some(waiting.id),
            Asked::Decided(decision) => {
                assert!(decision.is_none(), "{to} is allowed");
                None
            }
        }
    }

    fn is_allowed(&self, to: &str, now: Duration) -> bool {
        matches!(self.admit(to, now), Asked::Decided(Some(_)))
    }

    /// Returns the reasons of the denials since the last call.
    fn reasons(&self) -> Vec<String> {
        let reason = |note| match note {
            Some(Note::Verdict { record, .. }) => Some(record.reason),
            _ => None,
        };
        self.notes.try_iter().filter_map(reason).collect()
    }
}

const UNKNOWN: &str = "203.0.113.9:443";

#[test]
fn flow_waits_for_one_question_and_goes_on_by_its_answer() {
    let fixture = Fixture::new();
    assert!(fixture.is_allowed("203.0.113.1:80", NOW));
    let id = fixture.held(UNKNOWN, NOW).unwrap();
    assert_eq!(fixture.held(UNKNOWN, NOW + SECOND), Some(id), "it is asked about once");
    let questions = || {
        let is_question = |note: &Option<Note>| matches!(note, Some(Note::Question(_)));
        fixture.notes.try_iter().filter(is_question).count()
    };
    assert_eq!(questions(), 1);
    assert!(fixture.egress.answer_question(id, Answer::Run, NOW + SECOND));
    assert!(fixture.is_allowed(UNKNOWN, NOW + SECOND));
    assert!(fixture.held("203.0.113.9:80", NOW + SECOND).is_some(), "another port is unknown");

    let other = fixture.held("203.0.113.8:443", NOW).unwrap();
    assert!(fixture.egress.answer_question(other, Answer::Once, NOW));
    assert!(fixture.is_allowed("203.0.113.8:443", NOW + ONCE_FOR - SECOND));
    assert!(fixture.held("203.0.113.8:443", NOW + ONCE_FOR).is_some());
}

#[test]
fn denied_destination_is_not_asked_about_again() {
    let fixture = Fixture::new();
    let id = fixture.held(UNKNOWN, NOW).unwrap();
    assert!(fixture.egress.answer_question(id, Answer::Deny, NOW));
    assert_eq!(fixture.held(UNKNOWN, NOW + SECOND * 9999), None);
    let id = fixture.held("203.0.113.8:443", NOW).unwrap();
    assert!(fixture.egress.answer_question(id, Answer::Unattended, NOW));
    assert_eq!(fixture.held("203.0.113.8:443", NOW), None);
    assert!(fixture.held("203.0.113.8:443", NOW + UNATTENDED_FOR).is_some());
    let reasons = fixture.reasons();
    assert_eq!(
        reasons,
        ["no rule, and denied when asked for (--ask)", "no rule, and nobody to ask (--ask)"]
    );
}

#[test]
fn question_without_answer_is_denied_when_its_time_is_over() {
    let fixture = Fixture::new();
    let id = fixture.held(UNKNOWN, NOW).unwrap();
    fixture.egress.expire_questions(NOW + LIMITS.within - SECOND);
    assert!(fixture.egress.is_waiting(id));
    let end = NOW + LIMITS.within;
    // A late answer changes nothing, even before the timer has run.
    assert!(!fixture.egress.answer_question(id, Answer::Run, end));
    fixture.egress.expire_questions(end);
    assert!(!fixture.egress.is_waiting(id));
    assert_eq!(fixture.held(UNKNOWN, end), None);
    assert!(
        fixture.notes.try_iter().any(|note| matches!(note, Some(Note::Over(over)) if over == id))
    );
    let again = fixture.held(UNKNOWN, end + UNANSWERED_FOR).unwrap();
    assert_ne!(again, id);
    assert!(!fixture.egress.answer_question(id, Answer::Run, end + UNANSWERED_FOR));
    assert!(fixture.held(UNKNOWN, end + UNANSWERED_FOR).is_some());
}

#[test]
fn late_repeated_and_invented_answers_are_ignored_and_counted() {
    let fixture = Fixture::new();
    let id = fixture.held(UNKNOWN, NOW).unwrap();
    assert!(fixture.egress.answer_question(id, Answer::Deny, NOW));
    for invented in [id, 0, id + 1, u64::MAX] {
        assert!(!fixture.egress.answer_question(invented, Answer::Run, NOW));
    }
    assert_eq!(fixture.egress.answers_ignored(), 4);
    assert_eq!(fixture.held(UNKNOWN, NOW), None, "the first answer holds");
}

#[test]
fn flood_of_destinations_asks_few_at_a_time_and_blocks_nothing_that_is_allowed() {
    let fixture = Fixture::new();
    let to = |number: u32| format!("198.51.{}.{}:443", number / 250, number % 250);
    let held = (0..2000).filter(|number| fixture.held(&to(*number), NOW).is_some()).count();
    assert_eq!((held, fixture.egress.questions()), (LIMITS.at_a_time, 4));
    assert!(fixture.is_allowed("203.0.113.1:80", NOW));
    let mut now = NOW;
    for number in 0..3000 {
        now += LIMITS.within;
        fixture.egress.expire_questions(now);
        fixture.held(&to(number), now);
        fixture.notes.try_iter().for_each(drop);
    }
    let state = fixture.egress.state();
    let asking = state.asking.as_ref().unwrap();
    assert!(asking.denied.len() <= DENIED_MAX && asking.waiting.len() <= LIMITS.at_a_time);
}

#[test]
fn own_metadata_and_link_local_addresses_are_never_asked_about() {
    let fixture = Fixture::new();
    for to in ["169.254.169.254:80", "[fe80::1]:80", "[fd00:ec2::254]:80", "100.100.100.200:80"] {
        assert_eq!(fixture.held(to, NOW), None, "{to}");
    }
    // The engine knows the host's own addresses. An approval, too, opens none of them.
    let own = |now| {
        let to = UNKNOWN.parse().unwrap();
        fixture.egress.admit(to, None, Protocol::Tcp, false, now, &fixture.counters)
    };
    assert!(matches!(own(NOW), Asked::Decided(None)));
    let id = fixture.held(UNKNOWN, NOW).unwrap();
    fixture.egress.answer_question(id, Answer::Run, NOW);
    assert!(fixture.is_allowed(UNKNOWN, NOW) && matches!(own(NOW), Asked::Decided(None)));
}

#[test]
fn other_policy_forgets_answers() {
    let fixture = Fixture::new();
    for (to, answer) in [(UNKNOWN, Answer::Run), ("203.0.113.8:443", Answer::Deny)] {
        let id = fixture.held(to, NOW).unwrap();
        fixture.egress.answer_question(id, answer, NOW);
    }
    let source = PolicySource { default: Some(Action::Deny), ..PolicySource::default() };
    fixture.egress.replace(ringfence_policy::Policy::new(source).unwrap());
    for to in [UNKNOWN, "203.0.113.8:443", "203.0.113.1:80"] {
        assert!(fixture.held(to, NOW).is_some(), "{to}");
    }
}

#[test]
fn query_for_the_addresses_of_an_unknown_name_waits() {
    let fixture = Fixture::new();
    let ends = QueryEnds {
        guest: "10.0.0.2:4000".parse().unwrap(),
        server: "10.0.0.1:53".parse().unwrap(),
        over: Protocol::Udp,
    };
    let query = |kind: u8| {
        let mut bytes = vec![0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        bytes.extend_from_slice(b"\x03new\x03org\x00\x00");
        bytes.extend_from_slice(&[kind, 0, 1]);
        bytes
    };
    let asked = |kind, can_wait, now| {
        fixture.egress.query(ends, &query(kind), can_wait, None, now, &fixture.counters)
    };
    assert!(matches!(asked(16, true, NOW), Asked::Decided(QueryFate::Reply(_))), "TXT");
    assert!(matches!(asked(1, false, NOW), Asked::Decided(QueryFate::Reply(_))));
    let Asked::Held(first) = asked(1, true, NOW) else { panic!("it does not wait") };
    let Asked::Held(second) = asked(28, true, NOW) else { panic!("it does not wait") };
    assert_eq!(first.id, second.id);
    let subject = fixture.notes.try_iter().find_map(|note| match note {
        Some(Note::Question(question)) => Some(question.subject),
        _ => None,
    });
    assert_eq!(subject, Subject::of_query(&HostName::parse("new.org").unwrap()));
    fixture.egress.answer_question(first.id, Answer::Once, NOW);
    assert!(matches!(asked(1, true, NOW), Asked::Decided(QueryFate::Forward(_))));
    assert!(matches!(asked(16, false, NOW), Asked::Decided(QueryFate::Forward(_))));
}
