// Reach the goal, wherever it is now.
//
// Knowledge: the goal is a place, so the agent walks towards it unless a wall is known in between or it has been there in
// this episode; a bump means a wall. Where that does not help, a skill learns the way to this goal. A goal that is reached
// reliably has a cached policy; when the goal moves, the agent follows the policy of the new goal if it has one, and
// otherwise begins with what it knows about the walls.

!live.

+!live <- while (.more_episodes) { !reach }.

+!reach <- .begin_episode; .abolish(visited(_)); !prepare; !set_mode; while (not over) { !act }; !review.

@known_goal
+!prepare : goal(X, Y) & prepared(X, Y) <- true.
@new_goal
+!prepare : goal(X, Y) <- +prepared(X, Y); for (wall(S, A)) { .forbid(goal(X, Y), S, A) }.

// With a policy every fifth episode searches for a better one, until three searches in a row were of no use.
+!set_mode : goal(X, Y) & settled(X, Y) <- .abolish(mode(_)); +mode(follow).
+!set_mode : goal(X, Y) & has_policy(goal(X, Y), _) & episode(N) & N mod 5 > 0 <- .abolish(mode(_)); +mode(follow).
+!set_mode <- .abolish(mode(_)); +mode(search).

@follow_policy
+!act : mode(follow) & goal(X, Y) <- .policy_action(goal(X, Y), A); !go(X, Y, A).
@towards
+!act : goal(X, Y) & state(S) & closer(A, N) & not wall(S, A) & not visited(N) <- !go(X, Y, A).
@explore
+!act : goal(X, Y) <- .rl_action(goal(X, Y), A); !go(X, Y, A).

+!go(X, Y, A) : state(S) <- +visited(S); .do(A); .learn(goal(X, Y)); !note(X, Y, S, A).

+!note(X, Y, S, A) : bumped(A) & not wall(S, A) <- +wall(S, A); .forbid(goal(X, Y), S, A).
+!note(X, Y, S, A) <- true.

// A path that worked once works again; a shorter one replaces it.
@compare
+!review : mode(search) & outcome(success) & goal(X, Y) & .score(goal(X, Y), R)
    <- .cache_policy(goal(X, Y)); !judge(X, Y, R).
@cache
+!review : mode(search) & outcome(success) & goal(X, Y) <- .cache_policy(goal(X, Y)).
@lost
+!review : mode(search) & goal(X, Y) & .score(goal(X, Y), R) <- !judge(X, Y, R).
@drop
+!review : mode(follow) & not outcome(success) & goal(X, Y) <- .drop_policy(goal(X, Y)); .abolish(settled(X, Y)).
@continue
+!review <- true.

+!judge(X, Y, R) : .score(goal(X, Y), S) & S > R <- .abolish(fruitless(X, Y, _)).
+!judge(X, Y, _) : fruitless(X, Y, 2) <- .abolish(fruitless(X, Y, _)); +settled(X, Y).
+!judge(X, Y, _) : fruitless(X, Y, 1) <- .abolish(fruitless(X, Y, _)); +fruitless(X, Y, 2).
+!judge(X, Y, _) <- +fruitless(X, Y, 1).

// An action that brings the agent closer, and the state that it leads to.
closer(A, N) :- at(X, Y) & goal(GX, GY) & size(W, _) & move(A, DX, DY) & DX * (GX - X) + DY * (GY - Y) > 0
    & N = (Y + DY) * W + X + DX.
