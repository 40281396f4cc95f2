// Fetch the passenger and bring it to its destination.
//
// Knowledge: the task has four parts that follow each other (go to the passenger, pick it up, go to the destination, drop
// it), and a bump means a wall. So the agent learns only how to go to each of the four stops: a skill per stop, over the
// 25 cells instead of the 500 states of the environment.

!live.

+!live <- !only_drive; while (.more_episodes) { !serve }.

+!only_drive <- for (stop(L, _, _)) { .use_only(go(L), [0, 1, 2, 3]) }.

+!serve <- .begin_episode; while (not over) { !act }.

@pick_up
+!act : passenger(P) & stop(P, X, Y) & at(X, Y) <- .do(4).
@drop_off
+!act : passenger(4) & destination(D) & stop(D, X, Y) & at(X, Y) <- .do(5).
@fetch
+!act : passenger(P) & P < 4 <- !go(P).
@deliver
+!act : destination(D) <- !go(D).

// Every second episode explores; the others show what the skills can do.
+!go(L) : at(X, Y) & size(W, _) & episode(N) & N mod 2 == 1 <-
    S = Y * W + X; .rl_action(go(L), S, A); .do(A); !learn(L, S); !note(S, A).
+!go(L) : at(X, Y) & size(W, _) <-
    S = Y * W + X; .best_action(go(L), S, A); .do(A); !learn(L, S); !note(S, A).

+!learn(L, S) : at(X, Y) & stop(L, X, Y) & size(W, _) <- .learn(go(L), S, Y * W + X, true).
+!learn(L, S) : at(X, Y) & size(W, _) <- .learn(go(L), S, Y * W + X, false).

+!note(S, A) : bumped(A) & not wall(S, A) <- +wall(S, A); for (stop(L, _, _)) { .forbid(go(L), S, A) }.
+!note(S, A) <- true.
